# SPDX-License-Identifier: Apache-2.0
"""End what a run started and remove the shared memory it left behind (Linux, standard library only).

Ray's daemons and vLLM's engine leave the launcher's process group, and a killed engine never unlinks its
``/dev/shm`` segments. Every process of a run inherits one environment variable, by which it is found (`run_marks`).

A process that was killed shows no environment while the kernel takes its memory back, which is seconds for a large one.
So a process that was seen once is remembered by its number and its start, and waited for until it is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

RUN_ID_ENV = "SCALERL_VERL_RUN_ID"
_KILL_WAIT_S = 20.0
_log = logging.getLogger(__name__)


class Process(NamedTuple):
    """A process and no later one of the same number.

    Args:
        pid: its number.
        started: its start in clock ticks since boot.
    """

    pid: int
    started: int

    @property
    def is_alive(self) -> bool:
        """Whether it still runs or is still ending (see `start_of`)."""
        return start_of(self.pid) == self.started


def start_of(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None if it has ended, also if its parent has not noticed yet.

    Its memory and files are gone by then. A process whose main thread has ended, and others have not, is there.
    """
    folder = Path(f"/proc/{pid}")
    try:
        # The name of the program, in parentheses, may hold anything; state and start are fields 3 and 22.
        fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        if fields[0] in (b"Z", b"X") and len(os.listdir(folder / "task")) <= 1:
            return None
    except OSError:
        return None
    return int(fields[19])


def run_marks(run_id: str) -> dict[str, str]:
    """What the environment of a run needs for its processes to be found.

    ``SPT_NOENV`` is for those that set their title, as Ray's agents do: without it the title takes the memory in which
    Linux shows the environment, and they are seen no more. They outlive the cluster by a minute.
    """
    return {RUN_ID_ENV: run_id, "SPT_NOENV": "1"}


def see_processes(run_id: str) -> set[Process]:
    """Processes whose environment carries ``SCALERL_VERL_RUN_ID=run_id``, this process left out.

    One that is ending shows no environment: remember what was seen, and give it to `end_processes`.
    """
    wanted = f"{RUN_ID_ENV}={run_id}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        # Processes end while we look, and others' environments are not ours to read.
        with contextlib.suppress(OSError):
            started = start_of(int(entry.name))
            is_ours = wanted in (_living_thread(entry) / "environ").read_bytes().split(b"\0")
            # The number may have passed on to another process between the two looks.
            if is_ours and started is not None and started == start_of(int(entry.name)):
                found.add(Process(int(entry.name), started))
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
        living = {process for process in seen if process.is_alive}
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
        names = ", ".join(f"{process.pid} ({_title_of(process.pid)})" for process in sorted(living))
        _log.warning("%d processes of the run did not end %g s after SIGKILL: %s", len(living), kill_wait_s, names)
    return len(asked - living)


def _send(processes: Iterable[Process], number: signal.Signals) -> None:
    for process in processes:
        # Gone in between, or no longer ours to end; what stays is named in the end.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def _title_of(pid: int) -> str:
    """The name of a process's program, also while it is ending."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "gone by now"


def _living_thread(entry: Path) -> Path:
    """Where ``/proc`` shows memory and files of the process ``entry``: its main thread shows none once it has ended."""
    state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
    others = (task for task in (entry / "task").iterdir() if task.name != entry.name) if state in (b"Z", b"X") else ()
    return next(iter(others), entry)


def _mapped_segments(entry: Path) -> set[str]:
    """Names under ``/dev/shm`` that the process ``/proc/<pid>`` has mapped or open."""
    found = set()
    # Processes end while we look, and others' maps are not ours to read.
    with contextlib.suppress(OSError):
        entry = _living_thread(entry)
        for line in (entry / "maps").read_text(encoding="utf-8", errors="replace").split("\n"):
            if "/dev/shm/" in line:
                found.add(line.split("/dev/shm/", 1)[1].removesuffix(" (deleted)"))
    with contextlib.suppress(OSError):
        for handle in (entry / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(handle)
                if target.startswith("/dev/shm/"):
                    found.add(target.removeprefix("/dev/shm/").removesuffix(" (deleted)"))
    return found


def find_shared_memory(run_id: str) -> set[str]:
    """Names of the segments that processes of the run have mapped or open now.

    Nothing in a segment says who made it: ask while the run's processes live, and remember the answers.
    """
    return {name for pid in find_processes(run_id) for name in _mapped_segments(Path(f"/proc/{pid}"))}


def remove_shared_memory(names: Iterable[str]) -> list[str]:
    """Remove segments of ours that nobody has open any more.

    Args:
        names: segments that `find_shared_memory` saw during the run; no other is touched.

    Returns:
        Names removed.
    """
    folder = Path("/dev/shm")
    present = [name for name in names if "/" not in name and (folder / name).is_file()]
    if not present:
        return []
    in_use = set().union(*(_mapped_segments(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()))
    removed = []
    for name in sorted(set(present) - in_use):
        with contextlib.suppress(FileNotFoundError):
            if (folder / name).lstat().st_uid == os.getuid():
                (folder / name).unlink()
                removed.append(name)
    return removed


def resident_gib(run_id: str) -> float:
    """Memory of all processes of a run in GiB, shared pages divided among their users (PSS)."""
    total_kib = 0
    for pid in find_processes(run_id):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").split("\n"):
                if line.startswith("Pss:"):
                    total_kib += int(line.split()[1])
                    break
    return total_kib / 2**20
