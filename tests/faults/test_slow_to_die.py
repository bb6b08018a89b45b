# SPDX-License-Identifier: Apache-2.0
"""A killed process that is still ending is waited for, though the system shows nothing of its memory any more.

Such a moment is made to last: the first process of a PID namespace, once killed, gives its memory back and then stays
until every other process of the namespace has been reaped, and one of these belongs to a parent that waits to be told.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from recipes.launch import processes as reap
from recipes.launch.processes import RUN_ID_ENV, end_processes, find_processes, is_alive, see_processes

SLOW_TO_DIE = f"""
import ctypes, os, subprocess, sys, time
libc = ctypes.CDLL(None)
CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
if libc.unshare(CLONE_NEWPID) and libc.unshare(CLONE_NEWUSER | CLONE_NEWPID):
    print("refused", flush=True)
    sys.exit()
sleeper = [sys.executable, "-S", "-c", "import time; print(end='up', flush=True); time.sleep(600)"]
read_end, write_end = os.pipe()
first = os.fork()
if first == 0:
    os.dup2(write_end, 1)
    os.execve(sys.executable, sleeper, {{**os.environ, {RUN_ID_ENV!r}: sys.argv[1]}})
os.read(read_end, 2)
second = os.fork()
if second == 0:
    time.sleep(600)
    os._exit(0)
print(first, flush=True)
sys.stdin.readline()
os.waitpid(second, 0)
os.waitpid(first, 0)
print("over", flush=True)
"""

MAIN_THREAD_ENDED = """
import ctypes, mmap, os, platform, sys, threading, time
handle = os.open(sys.argv[1], os.O_RDWR)
memory = mmap.mmap(handle, 4096)
os.close(handle)
threading.Thread(target=time.sleep, args=(600,)).start()
print("up", flush=True)
EXIT_OF_THIS_THREAD = {"x86_64": 60, "aarch64": 93}[platform.machine()]
ctypes.CDLL(None).syscall(EXIT_OF_THIS_THREAD, 0)
"""


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def slow(run_id: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A process of the run that ends, after SIGKILL, when the helper beside it gets a line; and the helper."""
    helper = subprocess.Popen(
        [sys.executable, "-c", SLOW_TO_DIE, run_id], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert helper.stdout is not None
    first = helper.stdout.readline().strip()
    if first == "refused":
        helper.wait()
        pytest.skip("this system allows no PID namespaces")
    yield int(first), helper
    helper.communicate()
    assert find_processes(run_id) == []


def release(helper: subprocess.Popen[str]) -> None:
    assert helper.stdin is not None
    helper.stdin.write("\n")
    helper.stdin.flush()


def test_killed_process_without_an_environment_is_waited_for(
    run_id: str, slow: tuple[int, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, helper = slow
    process = psutil.Process(pid)
    sleep, num_unseen = reap.time.sleep, 0

    def sleep_then_release(seconds: float) -> None:
        nonlocal num_unseen
        sleep(seconds)
        num_unseen += not find_processes(run_id)
        if num_unseen == 5:
            assert is_alive(process)
            release(helper)

    monkeypatch.setattr(reap.time, "sleep", sleep_then_release)
    assert end_processes(run_id, grace_s=0) == 1
    assert num_unseen >= 5, "it was given up while it was still ending"
    assert not is_alive(process)


def test_process_that_does_not_end_is_named(
    run_id: str, slow: tuple[int, subprocess.Popen[str]], caplog: pytest.LogCaptureFixture
) -> None:
    pid, helper = slow
    with caplog.at_level(logging.WARNING):
        assert end_processes(run_id, grace_s=0, kill_wait_s=0.5) == 0
    assert f"1 processes of the run did not end 0.5 s after SIGKILL: {pid} (python" in caplog.text
    assert is_alive(psutil.Process(pid))
    release(helper)


def test_process_seen_before_it_began_to_end_is_waited_for(
    run_id: str, slow: tuple[int, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else killed it: only who saw it earlier knows that it belongs to the run."""
    pid, helper = slow
    known = see_processes(run_id)
    os.kill(pid, 9)
    while find_processes(run_id):
        reap.time.sleep(0.01)
    assert list(map(is_alive, known)) == [True]
    sleep, num_calls = reap.time.sleep, itertools.count()
    monkeypatch.setattr(reap.time, "sleep", lambda seconds: release(helper) if next(num_calls) == 3 else sleep(seconds))
    end_processes(run_id, known=known)
    assert not any(map(is_alive, known))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "syscall"), reason="needs Linux")
def test_process_whose_main_thread_has_ended_is_found_and_ended(run_id: str) -> None:
    """It looks like a zombie; its other threads hold its memory."""
    segment = Path(f"/dev/shm/scalerl_test_{run_id[:8]}")
    segment.write_bytes(bytes(4096))
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN_THREAD_ENDED, str(segment)],
            env={**os.environ, RUN_ID_ENV: run_id},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        stat = Path(f"/proc/{process.pid}/stat")
        while stat.read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z":
            reap.time.sleep(0.01)
        assert find_processes(run_id) == [process.pid]
        assert reap.find_shared_memory(run_id) == {segment.name}
        assert reap.remove_shared_memory([segment.name]) == []
        assert end_processes(run_id) == 1
        process.wait(timeout=5)
        assert reap.remove_shared_memory([segment.name]) == [segment.name]
    finally:
        segment.unlink(missing_ok=True)
