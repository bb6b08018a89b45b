# SPDX-License-Identifier: Apache-2.0
"""One run a folder: a lock that the run keeps itself, and the end of a run whose launcher was killed.

The lock is passed on to the run, so a folder stays locked while anything writes to it. A launcher that was killed
without a chance to clean up (SIGKILL, out of memory) leaves such a run behind: nobody shows its progress, nobody will
write its report, and its memory and shared memory stay taken. The next start finds it by its id and ends it.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from run_files import LaunchError

from scalerl_verl.reap import (
    end_processes,
    find_shared_memory,
    remove_shared_memory,
    see_processes,
    start_of,
)

LOCK_NAME = ".lock"
_RELEASE_S = 30.0
"""How long an ended run may take to let go of the folder: ending its processes has been waited for already."""


@dataclasses.dataclass(frozen=True)
class Owner:
    """The launcher that holds a folder.

    Args:
        run_id: id by which the processes of its run are found.
        pid: its process number.
        started: its start in clock ticks since boot, which tells it from a later process of the same number.
        machine: boot and process namespace in which that number means something.
    """

    run_id: str
    pid: int
    started: int
    machine: str

    @classmethod
    def this_process(cls, run_id: str) -> Owner:
        """This launcher."""
        started = start_of(os.getpid())
        assert started is not None
        return cls(run_id, os.getpid(), started, _machine())

    @property
    def is_here(self) -> bool:
        """Whether its processes would be seen from here (not another machine or container, not before a reboot)."""
        return self.machine == _machine()

    @property
    def is_alive(self) -> bool:
        """Whether the launcher still runs."""
        return start_of(self.pid) == self.started


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def read_owner(stream: IO[str]) -> Owner | None:
    """Who wrote the lock file last; None if nobody did, or is doing so right now."""
    stream.seek(0)
    try:
        return Owner(**json.loads(stream.read()))
    except (ValueError, TypeError):
        return None


def lock_folder(out: Path, run_id: str, say: Callable[[str], None]) -> IO[str]:
    """Take the folder ``out``, after ending what a killed launcher left running in it.

    Args:
        out: the folder, which exists.
        run_id: id of the run that is about to start.
        say: told what was ended.

    Returns:
        The open lock file: the folder is taken as long as it is open here or in a process that inherited it.

    Raises:
        LaunchError: somebody else holds the folder.
        OSError: the folder cannot be written.
    """
    stream = (out / LOCK_NAME).open("a+", encoding="utf-8")
    deadline: float | None = None
    while not _try_lock(stream):
        owner = read_owner(stream)
        if owner is None or not owner.is_here or owner.is_alive:
            stream.close()
            raise LaunchError(f"another run goes on in {out}: wait for it, or choose another folder with --out")
        if deadline is None:
            say("a run here lost its launcher, which was killed, and went on without it")
            deadline = time.monotonic() + _RELEASE_S
        _end_run(owner.run_id, say)
        if time.monotonic() > deadline:
            stream.close()
            raise LaunchError(f"the run in {out} cannot be ended: end its processes, or choose another --out")
        time.sleep(0.2)
    owner = read_owner(stream)
    if owner is not None and owner.is_here:
        # The driver of a run may die before its workers do.
        _end_run(owner.run_id, say)
    stream.seek(0)
    stream.truncate()
    json.dump(dataclasses.asdict(Owner.this_process(run_id)), stream)
    stream.flush()
    return stream


def _try_lock(stream: IO[str]) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _end_run(run_id: str, say: Callable[[str], None]) -> None:
    """End the processes of a run and remove the shared memory they used."""
    known = see_processes(run_id)
    if not known:
        return
    segments = find_shared_memory(run_id)
    num_ended = end_processes(run_id, known=known)
    removed = remove_shared_memory(segments)
    say(f"ended {num_ended} processes of the earlier run, removed {len(removed)} shared-memory segments")
