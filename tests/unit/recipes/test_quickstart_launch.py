# SPDX-License-Identifier: Apache-2.0
"""The launcher's decisions about files, without a run."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.recipe_modules import load_quickstart_module


@pytest.fixture(scope="module")
def launch() -> ModuleType:
    return load_quickstart_module("launch")


def _interrupted(paths) -> None:
    (paths.run / "checkpoints").mkdir(parents=True)
    (paths.run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("5")
    paths.metrics.write_text('{"step": 5, "data": {}}\n{"step": 6, "da')


def test_interrupted_run_is_resumed_and_its_metrics_are_kept(launch: ModuleType, tmp_path: Path) -> None:
    paths = launch.Paths(tmp_path)
    _interrupted(paths)
    assert "resuming" in launch.start_files(paths, fresh=False)
    paths.metrics.write_text('{"step": 6, "data": {}}\n')
    launch.merge_attempts(paths)
    assert [json.loads(line)["step"] for line in paths.metrics.read_text().splitlines()] == [5, 6]


@pytest.mark.parametrize("case", ["asked", "finished", "without checkpoint"])
def test_run_starts_anew(launch: ModuleType, tmp_path: Path, case: str) -> None:
    paths = launch.Paths(tmp_path)
    _interrupted(paths)
    if case == "finished":
        paths.finished.touch()
    if case == "without checkpoint":
        (paths.run / "checkpoints" / "latest_checkpointed_iteration.txt").unlink()
    assert launch.start_files(paths, fresh=case == "asked") == "starting anew"
    assert list(paths.run.iterdir()) == []


def test_second_quickstart_in_the_same_folder_is_refused(
    launch: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert launch.main(["--data", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert "another quickstart runs" in capsys.readouterr().out


def test_overrides_come_last(launch: ModuleType, tmp_path: Path) -> None:
    arguments = launch.parse_arguments(["--data", "d", "--out", "o", "--steps", "7", "--", "a.b=1"])
    command = launch.build_command(arguments, launch.Paths(tmp_path))
    assert command[1:4] == ["-m", "verl.trainer.main_ppo", "+scalerl=quickstart"]
    assert command[-2:] == ["trainer.total_training_steps=7", "a.b=1"]


def test_reason_of_a_failure_is_shown(launch: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    paths = launch.Paths(tmp_path)
    paths.run.mkdir()
    paths.log.write_text("noise\nscalerl_verl refuses to start this run:\n  1. the reason\n")
    launch.explain_failure(paths)
    assert "1. the reason" in capsys.readouterr().out
