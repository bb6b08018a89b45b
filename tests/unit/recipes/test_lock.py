# SPDX-License-Identifier: Apache-2.0
"""Who may use a folder: real processes that hold its lock, with and without a launcher that is still there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recipes.launch import lock as folder_lock
from recipes.launch.lock import RUN, has_launcher, lock_folder
from recipes.launch.processes import RUN_ID_ENV, end_processes, find_processes
from tests.paths import REPO

LAUNCHER = f"""
import os, subprocess, sys, time
from pathlib import Path
from recipes.launch.lock import lock_folder
lock = lock_folder(Path(sys.argv[1]), sys.argv[2], print)
run = subprocess.Popen(
    [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
    env={{**os.environ, {RUN_ID_ENV!r}: sys.argv[2]}},
    start_new_session=True,
    pass_fds=[lock.run.fileno()],
    stdout=subprocess.PIPE,
)
run.stdout.readline()
print("running", flush=True)
time.sleep(600)
"""
"""A launcher reduced to what matters here: it takes the folder as the real one does, and its run does nothing."""

Start = Callable[[str], subprocess.Popen]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """``start(run_id)``: a launcher in ``tmp_path`` whose run is up."""
    started: list[tuple[str, subprocess.Popen]] = []

    def launcher(run_id: str) -> subprocess.Popen:
        command = [sys.executable, "-c", LAUNCHER, str(tmp_path), run_id]
        process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
        started.append((run_id, process))
        assert process.stdout is not None and process.stdout.readline() == "running\n"
        return process

    yield launcher
    for run_id, process in started:
        process.kill()
        process.wait()
        end_processes(run_id, grace_s=0)


def test_folder_of_a_launcher_that_is_there_is_refused(start: Start, tmp_path: Path) -> None:
    assert not has_launcher(tmp_path)
    start("busy-run")
    assert has_launcher(tmp_path)
    with pytest.raises(ValueError, match=r"another run goes on in .*--out"):
        lock_folder(tmp_path, "mine", print)
    assert len(find_processes("busy-run")) == 1
    assert (tmp_path / RUN).read_text() == "busy-run"


@pytest.mark.parametrize("reaped", [True, False])
def test_run_of_a_killed_launcher_is_ended_and_said(start: Start, tmp_path: Path, reaped: bool) -> None:
    launcher = start("orphan-run")
    launcher.send_signal(signal.SIGKILL)
    if reaped:
        launcher.wait()
    else:
        os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)
    assert len(find_processes("orphan-run")) == 1 and not has_launcher(tmp_path)
    said: list[str] = []
    lock = lock_folder(tmp_path, "mine", said.append)
    assert find_processes("orphan-run") == []
    assert (tmp_path / RUN).read_text() == "mine"
    with pytest.raises(ValueError, match="another run goes on"):
        lock_folder(tmp_path, "third", print)
    lock.close()
    lock_folder(tmp_path, "third", print).close()
    assert "lost its launcher" in said[0] and "ended 1 processes" in said[1] and len(said) == 2


def test_workers_that_outlive_driver_and_launcher_are_ended(tmp_path: Path) -> None:
    """Nobody holds the lock any more, but what the run started is still there."""
    lock_folder(tmp_path, "earlier-run", print).close()
    worker = subprocess.Popen(
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
        env={**os.environ, RUN_ID_ENV: "earlier-run"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None and worker.stdout.readline() == "up\n"
    said: list[str] = []
    lock_folder(tmp_path, "mine", said.append).close()
    assert worker.wait() == -signal.SIGTERM
    assert len(said) == 1 and "ended 1 processes" in said[0]


def test_run_whose_processes_are_not_seen_from_here_is_left_alone(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another container, say: it cannot be ended, so the folder is not taken."""
    launcher = start("far-run")
    launcher.kill()
    launcher.wait()
    (tmp_path / RUN).write_text("a run of elsewhere")
    monkeypatch.setattr(folder_lock, "_RELEASE_S", 0.5)
    with pytest.raises(ValueError, match=r"cannot be ended: .*--out"):
        lock_folder(tmp_path, "mine", print)
    assert len(find_processes("far-run")) == 1
    assert not has_launcher(tmp_path), "a start that was refused holds nothing"


@pytest.mark.parametrize("text", ["", "half a li", '{"run_id": "x"}'])
def test_lock_file_that_names_no_run_ends_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / RUN).write_text(text)
    said: list[str] = []
    lock_folder(tmp_path, "mine", said.append).close()
    assert said == [] and (tmp_path / RUN).read_text() == "mine"
