# SPDX-License-Identifier: Apache-2.0
"""The launcher's decisions, without a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.launch.command import build_command, parse_arguments, quote
from recipes.launch.folder import (
    LaunchError,
    Paths,
    begin_attempt,
    end_attempt,
    merge_attempts,
    read_attempts,
    start_files,
    state_of,
)
from recipes.launch.launcher import main
from recipes.launch.lock import lock_folder
from recipes.launch.progress import Progress, explain_failure
from scalerl_verl.config.checks import find_problems
from scalerl_verl.json_lines import read_records
from scalerl_verl.planning.resolve import compose_run
from tests.paths import RECIPES

SETTINGS = {"seed": 0, "steps": None, "overrides": []}


def _interrupted(paths, steps_logged: int = 7, saved: tuple[int, ...] = (5,)) -> None:
    for step in saved:
        (paths.run / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    paths.latest_checkpoint.write_text(str(saved[-1]))
    paths.settings.write_text(json.dumps(SETTINGS))
    lines = [json.dumps({"step": step, "data": {}}) for step in range(steps_logged + 1)]
    paths.metrics.write_text("\n".join(lines) + '\n{"step": 9, "da')


def test_interrupted_run_is_resumed_and_its_metrics_are_kept(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    _interrupted(paths)
    assert "resuming" in start_files(paths, False, SETTINGS)
    paths.metrics.write_text('{"step": 8, "data": {}}\n')
    merge_attempts(paths)
    assert [record["step"] for record in read_records(paths.metrics)] == list(range(9))


def test_run_ended_between_checkpoint_and_log_resumes_from_the_checkpoint_before(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    _interrupted(paths, steps_logged=9, saved=(5, 10))
    assert "resuming" in start_files(paths, False, SETTINGS)
    assert paths.latest_checkpoint.read_text() == "5"


@pytest.mark.parametrize("case", ["asked", "finished", "without checkpoint", "nothing logged"])
def test_run_starts_anew(tmp_path: Path, case: str) -> None:
    paths = Paths(tmp_path)
    _interrupted(paths, steps_logged=3 if case == "nothing logged" else 7)
    if case == "finished":
        paths.finished.touch()
    if case == "without checkpoint":
        paths.latest_checkpoint.unlink()
    assert start_files(paths, case == "asked", SETTINGS) == "starting anew"
    assert list(paths.run.iterdir()) == [paths.settings]


def test_other_settings_do_not_continue_an_interrupted_run(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    _interrupted(paths)
    with pytest.raises(LaunchError, match="--fresh"):
        start_files(paths, False, {**SETTINGS, "seed": 7})
    assert "anew" in start_files(paths, True, {**SETTINGS, "seed": 7})


def test_folder_of_somebody_else_is_not_deleted(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    paths.run.mkdir()
    (paths.run / "results.txt").write_text("mine")
    for fresh in (True, False):
        with pytest.raises(LaunchError, match="no run of this launcher"):
            start_files(paths, fresh, SETTINGS)
    assert (paths.run / "results.txt").read_text() == "mine"


def test_paths_with_any_characters_survive_the_override_grammar() -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for path in ("/a b/(c),d=e", "/home/jürgen/x", "/it's/{y}", "/back\\slash/'", "/~;![]#&"):
        (override,) = OverridesParser.create().parse_overrides([f"a.b={quote(path)}"])
        assert override.value() == path


def test_second_run_in_the_same_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    lock = lock_folder(tmp_path, "other", print)
    assert main([str(RECIPES / "tiny-gpu"), "--data", str(tmp_path), "--out", str(tmp_path)]) == 1
    lock.close()
    assert "another run goes on" in capsys.readouterr().err


def test_overrides_come_last(tmp_path: Path) -> None:
    arguments = parse_arguments([str(RECIPES / "quickstart"), "--steps", "7", "--", "a.b=1"])
    assert build_command(arguments, Paths(tmp_path))[-2:] == ["trainer.total_training_steps=7", "a.b=1"]


def test_quickstart_is_its_preset_graded_by_its_own_reward(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    command = build_command(parse_arguments([str(RECIPES / "quickstart"), "--seed", "3"]), Paths(tmp_path))
    config = compose_run([f"hydra.searchpath=['file://{command[4]}']", *command[5:]])
    preset = compose_run(["+scalerl=quickstart"])
    assert find_problems(config) == []
    for part in ("algorithm", "transfer_queue"):
        assert config[part] == preset[part]
    assert config.actor_rollout_ref.actor.optim == preset.actor_rollout_ref.actor.optim
    assert Path(config.reward.custom_reward_function.path).parts[-2:] == ("quickstart", "reward.py")
    assert config.data.seed == config.actor_rollout_ref.rollout.seed == 3
    assert config.ray_kwargs.ray_init.address == "local"


@pytest.mark.parametrize(
    ("code", "is_finished", "state"),
    [(None, False, "killed"), (130, False, "interrupted"), (9, False, "failed"), (0, True, "finished")],
)
def test_state_is_that_of_the_last_attempt(tmp_path: Path, code: int | None, is_finished: bool, state: str) -> None:
    paths = Paths(tmp_path)
    assert state_of(paths) == "waiting"
    for last in (1, code):
        begin_attempt(paths)
        if last is not None:
            end_attempt(paths, last)
    if is_finished:
        paths.run.mkdir()
        paths.finished.touch()
    assert state_of(paths) == state
    assert [attempt["code"] for attempt in read_attempts(paths)] == [1, code]


def test_reason_of_a_failure_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    paths = Paths(tmp_path)
    paths.run.mkdir()
    paths.log.write_text("noise\nscalerl_verl refuses to start this run:\n  1. the reason\n")
    explain_failure(paths)
    assert "1. the reason" in capsys.readouterr().out


def test_held_out_pass_rate_is_the_mean_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two generations a problem: verl logs the best of both and its spread under the same beginning."""
    paths = Paths(tmp_path)
    paths.run.mkdir()
    of = {"sum/acc/mean@2": 0.5, "sum/acc/best@2/mean": 0.9, "sum/acc/best@2/std": 0.1, "max/acc/mean@2": 0.7}
    data = {f"val-core/{name}": value for name, value in of.items()}
    paths.metrics.write_text(json.dumps({"step": 3, "data": data}) + "\n")
    Progress(paths).poll()
    assert "step   3, HELD-OUT pass rate 0.600" in capsys.readouterr().out
