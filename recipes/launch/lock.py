# SPDX-License-Identifier: Apache-2.0
"""One run a folder: a lock that the run keeps itself, and the end of a run whose launcher was killed.

There are two locks. The launcher alone holds the one; the other is passed on to the run, so a folder stays locked while
anything writes to it. A launcher that was killed without a chance to clean up (SIGKILL, out of memory) leaves its run
behind: nobody shows its progress, nobody will write its report, and its memory and shared memory stay taken. The next
start finds it by its id, which stands in the second lock's file, and ends it.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from recipes.launch.folder import LaunchError
from recipes.launch.processes import end_processes, find_shared_memory, remove_shared_memory, see_processes

LAUNCHER, RUN = ".launcher.lock", ".lock"
_RELEASE_S = 30.0
"""How long an ended run may take to let go of the folder: ending its processes has been waited for already."""


@dataclass(frozen=True)
class FolderLock:
    """A folder is taken as long as its lock files are open: ``run`` also in a process that inherited it."""

    launcher: IO[str]
    run: IO[str]

    def close(self) -> None:
        self.run.close()
        self.launcher.close()


def try_lock(path: Path) -> IO[str] | None:
    """A lock file, open and locked; None if somebody holds it."""
    stream = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        return None
    return stream


def has_launcher(out: Path) -> bool:
    """Whether a launcher works in ``out``."""
    if not (out / LAUNCHER).exists():
        return False
    stream = try_lock(out / LAUNCHER)
    if stream is not None:
        stream.close()
    return stream is None


def lock_folder(out: Path, run_id: str, say: Callable[[str], None]) -> FolderLock:
    """Take the folder ``out``, after ending what a killed launcher left running in it.

    Args:
        out: the folder, which exists.
        run_id: id of the run that is about to start.
        say: told what was ended.

    Raises:
        LaunchError: somebody else holds the folder.
        OSError: the folder cannot be written.
    """
    launcher = try_lock(out / LAUNCHER)
    if launcher is None:
        raise LaunchError(f"another run goes on in {out}: wait for it, or choose another folder with --out")
    path = out / RUN
    earlier = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    run = try_lock(path)
    if run is None:
        say("a run here lost its launcher, which was killed, and went on without it")
    # also where the lock is free: the driver of a run may die before its workers do
    _end_run(earlier, say)
    deadline = time.monotonic() + _RELEASE_S
    while run is None:
        if time.monotonic() > deadline:
            launcher.close()
            raise LaunchError(f"the run in {out} cannot be ended: end its processes, or choose another --out")
        time.sleep(0.2)
        _end_run(earlier, say)
        run = try_lock(path)
    run.truncate(0)
    run.write(run_id)
    run.flush()
    return FolderLock(launcher, run)


def _end_run(run_id: str, say: Callable[[str], None]) -> None:
    """End the processes of a run and remove the shared memory they used."""
    known = see_processes(run_id) if run_id else set()
    if not known:
        return
    segments = find_shared_memory(run_id)
    num_ended = end_processes(run_id, known=known)
    removed = remove_shared_memory(segments)
    say(f"ended {num_ended} processes of the earlier run, removed {len(removed)} shared-memory segments")
