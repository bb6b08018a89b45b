# SPDX-License-Identifier: Apache-2.0
"""The launcher's decisions about files, without a run."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from types import ModuleType

import pytest

from scalerl_verl.json_lines import read_records
from tests.recipe_modules import load_quickstart_module


@pytest.fixture(scope="module")
def launch() -> ModuleType:
    return load_quickstart_module("launch")


@pytest.fixture(scope="module")
def run_files() -> ModuleType:
    return load_quickstart_module("run_files")


@pytest.fixture(scope="module")
def launch_line() -> ModuleType:
    return load_quickstart_module("launch_line")


SETTINGS = {"seed": 0, "steps": None, "overrides": []}


def _interrupted(paths, steps_logged: int = 7, saved: tuple[int, ...] = (5,)) -> None:
    for step in saved:
        (paths.run / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    paths.latest_checkpoint.write_text(str(saved[-1]))
    paths.settings.write_text(json.dumps(SETTINGS))
    lines = [json.dumps({"step": step, "data": {}}) for step in range(steps_logged + 1)]
    paths.metrics.write_text("\n".join(lines) + '\n{"step": 9, "da')


def test_interrupted_run_is_resumed_and_its_metrics_are_kept(run_files: ModuleType, tmp_path: Path) -> None:
    paths = run_files.Paths(tmp_path)
    _interrupted(paths)
    assert "resuming" in run_files.start_files(paths, False, SETTINGS)
    paths.metrics.write_text('{"step": 8, "data": {}}\n')
    run_files.merge_attempts(paths)
    assert [record["step"] for record in read_records(paths.metrics)] == list(range(9))


def test_run_ended_between_checkpoint_and_log_resumes_from_the_checkpoint_before(
    run_files: ModuleType, tmp_path: Path
) -> None:
    paths = run_files.Paths(tmp_path)
    _interrupted(paths, steps_logged=9, saved=(5, 10))
    assert "resuming" in run_files.start_files(paths, False, SETTINGS)
    assert paths.latest_checkpoint.read_text() == "5"


@pytest.mark.parametrize("case", ["asked", "finished", "without checkpoint", "nothing logged"])
def test_run_starts_anew(run_files: ModuleType, tmp_path: Path, case: str) -> None:
    paths = run_files.Paths(tmp_path)
    _interrupted(paths, steps_logged=3 if case == "nothing logged" else 7)
    if case == "finished":
        paths.finished.touch()
    if case == "without checkpoint":
        paths.latest_checkpoint.unlink()
    assert run_files.start_files(paths, case == "asked", SETTINGS) == "starting anew"
    assert list(paths.run.iterdir()) == [paths.settings]


def test_other_settings_do_not_continue_an_interrupted_run(run_files: ModuleType, tmp_path: Path) -> None:
    paths = run_files.Paths(tmp_path)
    _interrupted(paths)
    with pytest.raises(run_files.LaunchError, match="--fresh"):
        run_files.start_files(paths, False, {**SETTINGS, "seed": 7})
    assert "anew" in run_files.start_files(paths, True, {**SETTINGS, "seed": 7})


def test_folder_of_somebody_else_is_not_deleted(run_files: ModuleType, tmp_path: Path) -> None:
    paths = run_files.Paths(tmp_path)
    paths.run.mkdir()
    (paths.run / "results.txt").write_text("mine")
    for fresh in (True, False):
        with pytest.raises(run_files.LaunchError, match="no run of this launcher"):
            run_files.start_files(paths, fresh, SETTINGS)
    assert (paths.run / "results.txt").read_text() == "mine"


def test_paths_with_any_characters_survive_the_override_grammar(launch_line: ModuleType) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for path in ("/a b/(c),d=e", "/home/jürgen/x", "/it's/{y}", "/back\\slash/'", "/~;![]#&"):
        (override,) = OverridesParser.create().parse_overrides([f"a.b={launch_line.quote(path)}"])
        assert override.value() == path


def test_second_quickstart_in_the_same_folder_is_refused(
    launch: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert launch.main(["--data", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert "another run goes on" in capsys.readouterr().out


def test_overrides_come_last(run_files: ModuleType, launch_line: ModuleType, tmp_path: Path) -> None:
    arguments = load_quickstart_module("launch").parse_arguments(
        ["--data", "d", "--out", "o", "--steps", "7", "--", "a.b=1"]
    )
    command = launch_line.build_command(arguments, run_files.Paths(tmp_path))
    assert command[1:4] == ["-m", "verl.trainer.main_ppo", "+scalerl=quickstart"]
    assert command[-2:] == ["trainer.total_training_steps=7", "a.b=1"]


def test_reason_of_a_failure_is_shown(run_files: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    paths = run_files.Paths(tmp_path)
    paths.run.mkdir()
    paths.log.write_text("noise\nscalerl_verl refuses to start this run:\n  1. the reason\n")
    load_quickstart_module("progress").explain_failure(paths)
    assert "1. the reason" in capsys.readouterr().out
