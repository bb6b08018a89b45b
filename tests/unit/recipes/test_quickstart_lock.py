# SPDX-License-Identifier: Apache-2.0
"""Who may use a folder: real processes that hold its lock, with and without a launcher that is still there."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from scalerl_verl.reap import RUN_ID_ENV, end_processes, find_processes
from tests.recipe_modules import QUICKSTART, load_quickstart_module

LAUNCHER = f"""
import os, subprocess, sys, time
sys.path.insert(0, {str(QUICKSTART)!r})
from pathlib import Path
from folder_lock import lock_folder
lock = lock_folder(Path(sys.argv[1]), sys.argv[2], print)
run = subprocess.Popen(
    [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
    env={{**os.environ, {RUN_ID_ENV!r}: sys.argv[2]}},
    start_new_session=True,
    pass_fds=[lock.fileno()],
    stdout=subprocess.PIPE,
)
run.stdout.readline()
print("running", flush=True)
time.sleep(600)
"""
"""A launcher reduced to what matters here: it takes the folder as launch.py does, and its run does nothing."""

Start = Callable[[str], subprocess.Popen]


@pytest.fixture(scope="module")
def folder_lock() -> ModuleType:
    return load_quickstart_module("folder_lock")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """``start(run_id)``: a launcher in ``tmp_path`` whose run is up."""
    started: list[tuple[str, subprocess.Popen]] = []

    def launcher(run_id: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(tmp_path), run_id], stdout=subprocess.PIPE, text=True
        )
        started.append((run_id, process))
        assert process.stdout is not None and process.stdout.readline() == "running\n"
        return process

    yield launcher
    for run_id, process in started:
        process.kill()
        process.wait()
        end_processes(run_id, grace_s=0)


def test_folder_of_a_launcher_that_is_there_is_refused(folder_lock: ModuleType, start: Start, tmp_path: Path) -> None:
    start("busy-run")
    with pytest.raises(ValueError, match=r"another run goes on in .*--out"):
        folder_lock.lock_folder(tmp_path, "mine", print)
    assert len(find_processes("busy-run")) == 1
    assert json.loads((tmp_path / ".lock").read_text())["run_id"] == "busy-run"


@pytest.mark.parametrize("reaped", [True, False])
def test_run_of_a_killed_launcher_is_ended_and_said(
    folder_lock: ModuleType, start: Start, tmp_path: Path, reaped: bool
) -> None:
    launcher = start("orphan-run")
    launcher.send_signal(signal.SIGKILL)
    if reaped:
        launcher.wait()
    else:
        os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)
    assert len(find_processes("orphan-run")) == 1
    said: list[str] = []
    with folder_lock.lock_folder(tmp_path, "mine", said.append) as lock:
        assert find_processes("orphan-run") == []
        assert folder_lock.read_owner(lock) == folder_lock.Owner.this_process("mine")
        with pytest.raises(ValueError, match="another run goes on"):
            folder_lock.lock_folder(tmp_path, "third", print)
    assert "lost its launcher" in said[0] and "ended 1 processes" in said[1] and len(said) == 2


def test_workers_that_outlive_driver_and_launcher_are_ended(folder_lock: ModuleType, tmp_path: Path) -> None:
    """Nobody holds the lock any more, but what the run started is still there."""
    with folder_lock.lock_folder(tmp_path, "earlier-run", print):
        pass
    worker = subprocess.Popen(
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
        env={**os.environ, RUN_ID_ENV: "earlier-run"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None and worker.stdout.readline() == "up\n"
    said: list[str] = []
    with folder_lock.lock_folder(tmp_path, "mine", said.append):
        assert worker.wait() == -signal.SIGTERM
    assert len(said) == 1 and "ended 1 processes" in said[0]


@pytest.mark.parametrize(
    "change",
    [{"machine": "another boot"}, {"started": 0, "machine": "another boot"}],
)
def test_holder_of_another_machine_or_container_is_left_alone(
    folder_lock: ModuleType, start: Start, tmp_path: Path, change: dict
) -> None:
    """Its process numbers mean nothing here, so whether it lives cannot be known: the lock says that it does."""
    start("far-run")
    owner = json.loads((tmp_path / ".lock").read_text())
    (tmp_path / ".lock").write_text(json.dumps({**owner, **change}))
    with pytest.raises(ValueError, match="another run goes on"):
        folder_lock.lock_folder(tmp_path, "mine", print)
    assert len(find_processes("far-run")) == 1


def test_another_process_of_the_same_number_is_not_the_launcher(folder_lock: ModuleType) -> None:
    mine = folder_lock.Owner.this_process("mine")
    assert mine.is_here and mine.is_alive
    assert not dataclasses.replace(mine, started=mine.started - 1).is_alive
    assert not dataclasses.replace(mine, pid=2**22 + 1).is_alive


@pytest.mark.parametrize("text", ["", "half a li", "{}", '{"run_id": "x"}', "[1]"])
def test_lock_file_that_says_nothing_is_nobody_s(folder_lock: ModuleType, tmp_path: Path, text: str) -> None:
    (tmp_path / ".lock").write_text(text)
    with (tmp_path / ".lock").open() as stream:
        assert folder_lock.read_owner(stream) is None
    with folder_lock.lock_folder(tmp_path, "mine", print) as lock:
        assert folder_lock.read_owner(lock).run_id == "mine"
