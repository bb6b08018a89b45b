# SPDX-License-Identifier: Apache-2.0
"""End what a run started and remove the shared memory it left behind (Linux, standard library only).

Ray's daemons and vLLM's engine leave the launcher's process group, and a killed engine never unlinks its
``/dev/shm`` segments. Every process of a run inherits one environment variable, by which it is found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

RUN_ID_ENV = "SCALERL_VERL_RUN_ID"
SHM_PREFIXES = (
    "psm_",
    "sem.mp-",
    "sem.loky-",
    "verl_weights_",
    "torch_",
    "mp-",
    "__KMP_REGISTERED_LIB_",
    "plasma",
    "ray_",
)
"""Names that Python, torch, OpenMP, Ray and verl give their segments."""


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
    """SIGTERM, then SIGKILL after ``grace_s`` seconds, every process of the run; returns how many there were."""
    seen: set[int] = set()
    deadline = time.monotonic() + grace_s
    while processes := find_processes(run_id):
        number = signal.SIGKILL if time.monotonic() > deadline else signal.SIGTERM
        for pid in processes:
            if pid not in seen or number == signal.SIGKILL:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        seen.update(processes)
        if all(_is_zombie(pid) for pid in processes):
            break
        time.sleep(0.2)
    return len(seen)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def _shared_memory_in_use() -> set[str]:
    """Names under ``/dev/shm`` that a living process has mapped or open."""
    used = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for line in (entry / "maps").read_text(errors="replace").splitlines():
                if "/dev/shm/" in line:
                    used.add(line.split("/dev/shm/", 1)[1].removesuffix(" (deleted)"))
        with contextlib.suppress(OSError):
            for handle in (entry / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(handle)
                    if target.startswith("/dev/shm/"):
                        used.add(target.removeprefix("/dev/shm/"))
    return used


def remove_shared_memory(since: float) -> list[str]:
    """Remove our user's segments that were made at or after ``since`` (Unix time) and that nobody has open.

    Args:
        since: start of the run; older segments belong to somebody else.

    Returns:
        Names removed.
    """
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return []
    in_use = _shared_memory_in_use()
    removed = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            facts = path.lstat()
            ours = facts.st_uid == os.getuid() and facts.st_ctime >= since and path.name.startswith(SHM_PREFIXES)
            if ours and path.name not in in_use and path.is_file():
                path.unlink()
                removed.append(path.name)
    return sorted(removed)


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
