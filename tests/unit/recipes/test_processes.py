# SPDX-License-Identifier: Apache-2.0
"""What a run started and left behind is found and ended; what belongs to others is not."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import pytest

from recipes.launch import processes as reap
from recipes.launch.processes import (
    RUN_ID_ENV,
    Process,
    end_processes,
    find_processes,
    find_shared_memory,
    remove_shared_memory,
    resident_gib,
    run_marks,
    see_processes,
)

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""
READY_AND_SLEEP = "import time; print('ready', flush=True); time.sleep(600)"
IGNORE_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READY_AND_SLEEP

SHM = Path("/dev/shm")
needs_shm = pytest.mark.skipif(not SHM.is_dir(), reason="no /dev/shm on this system")


def start(code: str, *arguments: str, site: bool = False, **environment: str) -> tuple[subprocess.Popen[str], str]:
    """A process, without installed packages unless ``site``, and the first line it printed."""
    process = subprocess.Popen(
        [sys.executable, *([] if site else ["-S"]), "-c", code, *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def run_id() -> Iterator[str]:
    """An id of a run that no other process has; whatever carries it is ended after the test."""
    name = uuid.uuid4().hex
    yield name
    end_processes(name, grace_s=0)


def test_child_and_grandchild_in_its_own_session_are_found_and_ended(run_id: str) -> None:
    child, grandchild = start(PARENT, READY_AND_SLEEP, **{RUN_ID_ENV: run_id})
    assert sorted(find_processes(run_id)) == sorted([child.pid, int(grandchild)])
    assert os.getsid(int(grandchild)) != os.getsid(child.pid)
    assert 0 < resident_gib(run_id) < 1
    assert end_processes(run_id) == 2
    assert child.wait(timeout=5) == -15, "SIGTERM suffices for a process that heeds it"
    assert not is_running(int(grandchild))
    assert find_processes(run_id) == []


def test_process_of_another_run_is_left_alone(run_id: str) -> None:
    ours, _ = start(READY_AND_SLEEP, **{RUN_ID_ENV: run_id})
    others = [
        start(READY_AND_SLEEP, **{RUN_ID_ENV: run_id + "0"})[0],
        start(READY_AND_SLEEP, **{"OTHER": run_id})[0],
        start(READY_AND_SLEEP, run_id)[0],
    ]
    try:
        assert find_processes(run_id) == [ours.pid]
        assert end_processes(run_id) == 1
        assert ours.wait(timeout=5) is not None
        assert all(other.poll() is None for other in others)
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_process_that_ignores_sigterm_is_killed_after_the_grace_time(run_id: str) -> None:
    process, _ = start(IGNORE_SIGTERM, **{RUN_ID_ENV: run_id})
    began = time.monotonic()
    assert end_processes(run_id, grace_s=0.5) == 1
    assert process.wait(timeout=5) == -9
    assert time.monotonic() - began >= 0.5


def test_process_started_behind_the_scan_by_one_that_dies_is_ended_too(
    run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = start(READY_AND_SLEEP, **{RUN_ID_ENV: run_id})
    late: list[int] = []

    def scan(wanted: str) -> set[Process]:
        found = see_processes(wanted)
        if not late:  # What a daemon does whose worker we just ended; it is gone itself before the next scan.
            late.append(start(READY_AND_SLEEP, **{RUN_ID_ENV: run_id})[0].pid)
            first.kill()
            first.wait()
        return found

    monkeypatch.setattr(reap, "see_processes", scan)
    assert end_processes(run_id) == 1
    assert not is_running(late[0])


def test_process_without_an_environment_during_one_scan_is_ended_too(
    run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _ = start(READY_AND_SLEEP, **{RUN_ID_ENV: run_id})
    scans = itertools.count()
    monkeypatch.setattr(reap, "see_processes", lambda wanted: see_processes(wanted) if next(scans) else set())
    assert end_processes(run_id) == 1
    assert process.wait(timeout=5) == -15


def test_process_that_set_its_title_is_found(run_id: str) -> None:
    """Ray's agents do; they outlive a cluster that was killed by a minute."""
    code = "from setproctitle import setproctitle; setproctitle('title'); " + READY_AND_SLEEP
    process, _ = start(code, site=True, **run_marks(run_id))
    assert Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"title\0")
    assert find_processes(run_id) == [process.pid]
    assert end_processes(run_id) == 1


def test_run_without_a_process_has_nothing_to_end(run_id: str) -> None:
    assert find_processes(run_id) == []
    assert end_processes(run_id) == 0
    assert resident_gib(run_id) == 0


def test_own_process_is_never_found(run_id: str) -> None:
    code = (
        "import sys; from recipes.launch.processes import end_processes, find_processes; "
        "print(find_processes(sys.argv[1]), end_processes(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, run_id],
        env={**os.environ, RUN_ID_ENV: run_id},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["[]", "0"], done.stderr


def make_segment(name: str) -> None:
    """A segment that its maker left behind: unmapped, not unlinked."""
    segment = shared_memory.SharedMemory(name=name, create=True, size=4096)
    resource_tracker.unregister(segment._name, "shared_memory")
    segment.close()


@pytest.fixture
def segment_name() -> Iterator[str]:
    """A name as Python gives it."""
    name = f"psm_{uuid.uuid4().hex[:8]}"
    yield name
    (SHM / name).unlink(missing_ok=True)


HOLD = (
    "import mmap, os, sys\n"
    "handle = os.open(sys.argv[1], os.O_RDWR)\n"
    "if sys.argv[2] == 'mapped':\n"
    "    memory = mmap.mmap(handle, 4096)\n"
    "    os.close(handle)\n" + READY_AND_SLEEP
)


@needs_shm
@pytest.mark.parametrize("how", ["mapped", "open"])
def test_segment_of_the_run_is_seen_and_removed_once_nobody_has_it(run_id: str, segment_name: str, how: str) -> None:
    make_segment(segment_name)
    user, _ = start(HOLD, str(SHM / segment_name), how, **{RUN_ID_ENV: run_id})
    seen = find_shared_memory(run_id)
    assert seen == {segment_name}
    assert remove_shared_memory(seen) == [], "a living process still has it"
    assert end_processes(run_id) == 1
    user.wait(timeout=5)
    assert remove_shared_memory(seen) == [segment_name]
    assert not (SHM / segment_name).exists()


@needs_shm
def test_segment_of_another_program_is_neither_seen_nor_removed(run_id: str, segment_name: str) -> None:
    make_segment(segment_name)
    start(READY_AND_SLEEP, **{RUN_ID_ENV: run_id})
    assert find_shared_memory(run_id) == set()
    assert remove_shared_memory(find_shared_memory(run_id)) == []
    assert (SHM / segment_name).exists()


@needs_shm
def test_segment_shared_with_another_program_is_kept(run_id: str, segment_name: str) -> None:
    make_segment(segment_name)
    start(HOLD, str(SHM / segment_name), "mapped", **{RUN_ID_ENV: run_id})
    other, _ = start(HOLD, str(SHM / segment_name), "mapped")
    try:
        seen = find_shared_memory(run_id)
        end_processes(run_id)
        assert remove_shared_memory(seen) == []
        assert (SHM / segment_name).exists()
    finally:
        other.kill()
        other.wait()


@needs_shm
def test_names_that_leave_the_folder_are_refused() -> None:
    assert remove_shared_memory({"../etc/hostname", "no-such-segment"}) == []
