# SPDX-License-Identifier: Apache-2.0
"""End what a run started and remove the shared memory it left behind (Linux, standard library only).

Ray's daemons and vLLM's engine leave the launcher's process group, and a killed engine never unlinks its
``/dev/shm`` segments. Every process of a run inherits one environment variable, by which it is found (`run_marks`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

RUN_ID_ENV = "SCALERL_VERL_RUN_ID"


def run_marks(run_id: str) -> dict[str, str]:
    """What the environment of a run needs for its processes to be found.

    ``SPT_NOENV`` is for those that set their title, as Ray's agents do: without it the title takes the memory in which
    Linux shows the environment, and they are seen no more. They outlive the cluster by a minute.
    """
    return {RUN_ID_ENV: run_id, "SPT_NOENV": "1"}


def find_processes(run_id: str) -> list[int]:
    """Process ids whose environment carries ``SCALERL_VERL_RUN_ID=run_id``, this process left out."""
    wanted = f"{RUN_ID_ENV}={run_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        # Processes end while we look, and others' environments are not ours to read.
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def end_processes(run_id: str, grace_s: float = 5.0) -> int:
    """SIGTERM, then SIGKILL after ``grace_s`` seconds, every process of the run; returns how many there were.

    Gives up 20 seconds after the first SIGKILL: a process stuck in the kernel cannot be ended.
    """
    seen: set[int] = set()
    deadline = time.monotonic() + grace_s
    empty_scans = 0
    # One empty scan proves nothing: a process shows no environment while it executes another program, and one that
    # we killed may have started another behind our back.
    while empty_scans < 2 and time.monotonic() < deadline + 20:
        processes = [pid for pid in find_processes(run_id) if not _is_zombie(pid)]
        number = signal.SIGKILL if time.monotonic() > deadline else signal.SIGTERM
        for pid in processes:
            if pid not in seen or number == signal.SIGKILL:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        seen.update(processes)
        empty_scans = 0 if processes else empty_scans + 1
        time.sleep(0.2)
    return len(seen)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def _mapped_segments(entry: Path) -> set[str]:
    """Names under ``/dev/shm`` that the process ``/proc/<pid>`` has mapped or open."""
    found = set()
    # Processes end while we look, and others' maps are not ours to read.
    with contextlib.suppress(OSError):
        for line in (entry / "maps").read_text(errors="replace").splitlines():
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
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total_kib += int(line.split()[1])
                    break
    return total_kib / 2**20
