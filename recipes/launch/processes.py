# SPDX-License-Identifier: Apache-2.0
"""End what a run started and remove the shared memory it left behind (Linux).

Ray's daemons and vLLM's engine leave the launcher's process group, and a killed engine never unlinks its
``/dev/shm`` segments. Every process of a run inherits one environment variable, by which it is found (`run_marks`).

A process that was killed shows no environment while the kernel takes its memory back, which is seconds for a large one.
So a process that was seen once is remembered and waited for until it is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
from psutil import Process

RUN_ID_ENV = "SCALERL_VERL_RUN_ID"
SHARED_MEMORY = "/dev/shm/"
_KILL_WAIT_S = 20.0
_log = logging.getLogger(__name__)


def run_marks(run_id: str) -> dict[str, str]:
    """What the environment of a run needs for its processes to be found.

    ``SPT_NOENV`` is for those that set their title, as Ray's agents do: without it the title takes the memory in which
    Linux shows the environment, and they are seen no more. They outlive the cluster by a minute.
    """
    return {RUN_ID_ENV: run_id, "SPT_NOENV": "1"}


def is_alive(process: Process) -> bool:
    """Whether a process runs or is still ending; not once its memory is gone and only its parent has not noticed.

    One whose main thread has ended looks ended, but is there as long as others run.
    """
    try:
        return process.is_running() and (not _is_ended(process) or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False


def _is_ended(process: Process) -> bool:
    return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def see_processes(run_id: str) -> set[Process]:
    """Processes whose environment carries ``SCALERL_VERL_RUN_ID=run_id``, this process left out.

    One that is ending shows no environment: remember what was seen, and give it to `end_processes`.
    """
    wanted = f"{RUN_ID_ENV}={run_id}".encode()
    found = set()
    for process in psutil.process_iter():
        # Processes end while we look, and others' environments are not ours to read.
        with contextlib.suppress(psutil.Error, OSError):
            is_ours = process.pid != os.getpid() and wanted in (_folder(process) / "environ").read_bytes().split(b"\0")
            # The number may have passed on to another process meanwhile.
            if is_ours and is_alive(process):
                found.add(process)
    return found


def find_processes(run_id: str) -> list[int]:
    """Numbers of the processes that `see_processes` finds."""
    return sorted(process.pid for process in see_processes(run_id))


def end_processes(
    run_id: str, grace_s: float = 5.0, known: Iterable[Process] = (), kill_wait_s: float = _KILL_WAIT_S
) -> int:
    """SIGTERM, then SIGKILL after ``grace_s`` seconds, every process of the run, and wait until all are gone.

    Gives up ``kill_wait_s`` seconds after the first SIGKILL, for a process may be stuck in the kernel, and logs a
    warning that names what is left. The caller's children stay zombies until the caller waits for them itself.

    Args:
        run_id: id of the run.
        grace_s: seconds between the signals.
        known: processes of the run seen earlier, of which some may be ending.
        kill_wait_s: seconds that killed processes are waited for.

    Returns:
        How many ended.
    """
    seen, asked = set(known), set[Process]()
    deadline, give_up = time.monotonic() + grace_s, float("inf")
    empty_scans = 0
    while True:
        seen |= see_processes(run_id)
        living = set(filter(is_alive, seen))
        # One empty scan proves nothing: a process shows no environment while it executes another program, and one
        # that we killed may have started another behind our back.
        empty_scans = 0 if living else empty_scans + 1
        now = time.monotonic()
        if empty_scans == 2 or now > give_up:
            break
        if now > deadline:
            give_up = min(give_up, now + kill_wait_s)
            _send(living, signal.SIGKILL)
        else:
            _send(living - asked, signal.SIGTERM)
        asked |= living
        time.sleep(0.2)
    if living:
        names = ", ".join(sorted(f"{process.pid} ({_title(process)})" for process in living))
        _log.warning("%d processes of the run did not end %g s after SIGKILL: %s", len(living), kill_wait_s, names)
    return len(asked - living)


def _send(processes: Iterable[Process], number: signal.Signals) -> None:
    for process in processes:
        # Gone in between, or no longer ours to end; what stays is named in the end.
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _title(process: Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return "gone by now"


def _folder(process: Process) -> Path:
    """Where ``/proc`` shows memory and files of a process: its main thread shows none once it has ended."""
    threads = [thread.id for thread in process.threads() if thread.id != process.pid] if _is_ended(process) else []
    return Path(f"/proc/{threads[0] if threads else process.pid}")


def _segments(process: Process) -> set[str]:
    """Names under ``/dev/shm`` that a process has mapped or open (psutil's maps walk every page table for this)."""
    found: set[str] = set()
    # Processes end while we look, and others' maps are not ours to read.
    with contextlib.suppress(psutil.Error, OSError):
        folder = _folder(process)
        lines = (folder / "maps").read_text(encoding="utf-8", errors="replace").split("\n")
        found.update(SHARED_MEMORY + line.split(SHARED_MEMORY, 1)[1] for line in lines if SHARED_MEMORY in line)
        for handle in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(handle))
    segments = (path.removeprefix(SHARED_MEMORY) for path in found if path.startswith(SHARED_MEMORY))
    return {name.removesuffix(" (deleted)") for name in segments}


def find_shared_memory(run_id: str) -> set[str]:
    """Names of the segments that processes of the run have mapped or open now.

    Nothing in a segment says who made it: ask while the run's processes live, and remember the answers.
    """
    return set().union(*map(_segments, see_processes(run_id)))


def remove_shared_memory(names: Iterable[str]) -> list[str]:
    """Remove segments of ours that nobody has open any more.

    Args:
        names: segments that `find_shared_memory` saw during the run; no other is touched.

    Returns:
        Names removed.
    """
    present = {name: Path(SHARED_MEMORY, name) for name in names if "/" not in name}
    present = {name: path for name, path in present.items() if path.is_file()}
    if not present:
        return []
    in_use = set().union(*map(_segments, psutil.process_iter()))
    removed = []
    for name in sorted(set(present) - in_use):
        with contextlib.suppress(FileNotFoundError):
            if present[name].lstat().st_uid == os.getuid():
                present[name].unlink()
                removed.append(name)
    return removed


def resident_gib(run_id: str) -> float:
    """Memory of all processes of a run in GiB, shared pages divided among their users (PSS)."""
    total = 0
    for process in see_processes(run_id):
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / 2**30
