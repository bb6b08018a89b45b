# SPDX-License-Identifier: Apache-2.0
"""Our names in another entry point of verl than main_ppo -> they had no effect, or failed minutes later -> refused."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from verl.trainer import main_ppo

from scalerl_verl.upstream.activation import is_checked
from scalerl_verl.verl import entry, startup
from tests.unit.composed import changed

NO_TRAINER = "is not the V1 trainer of verl.trainer.main_ppo"
OTHERS = {
    "verl.experimental.fully_async_policy.fully_async_main": f"FullyAsyncTaskRunner {NO_TRAINER}",
    "verl.experimental.one_step_off_policy.main_ppo": f"OneStepTaskRunner {NO_TRAINER}",
    "verl.trainer.main_generation_server": "main_generation_server ignores our names",
}
"""Entry point of verl -> what refuses our names there."""
VERL = Path(main_ppo.__file__).parents[1]


@pytest.mark.parametrize("program", OTHERS)
def test_entry_point_refuses_our_names_before_ray_starts(program: str, tmp_path: Path) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SCALERL_", "VERL_", "RAY_"))}
    done = subprocess.run(
        [sys.executable, "-m", program, "+scalerl=cispo", f"hydra.run.dir={tmp_path}/hydra"],
        env={**clean, "RAY_TMPDIR": str(tmp_path / "ray"), "CUDA_VISIBLE_DEVICES": ""},
        cwd=VERL.parent,  # the config of one_step_off_policy looks for verl's in a checkout
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert OTHERS[program] in done.stderr, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "ray").exists(), "Ray makes its session folder first of all"


def test_programs_that_ignore_our_names_exist_in_verl() -> None:
    assert [name for name in {*OTHERS, *entry.WITHOUT_TRAINER} if importlib.util.find_spec(name) is None] == []


def test_program_that_ignores_our_names_refuses_them_alone() -> None:
    for program in entry.WITHOUT_TRAINER:
        with pytest.raises(SystemExit, match=f"{program} ignores our names"):
            entry.refuse_other_program(["python", "-m", program, "+scalerl=fp32_head"])
        entry.refuse_other_program(["python", "-m", program, "data.path=/models/scalerl/cispo"])
    entry.refuse_other_program(["python", "-m", "verl.trainer.main_ppo", "+scalerl=cispo"])
    entry.refuse_other_program(["python", "train.py", "+scalerl=cispo"])


class RunnerOfAUser(main_ppo.TaskRunnerV1.__ray_metadata__.modified_class.__bases__[0]):  # type: ignore[misc]
    """verl's task runner with something added, as a launcher of a user has it."""


class _Launched(Exception):
    """In place of Ray's start."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, clean_environment: None, only_config_checks: list[str]) -> None:
    def start(**_: object) -> None:
        raise _Launched

    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("runner", [main_ppo.TaskRunnerV1, ray.remote(RunnerOfAUser)])
def test_launcher_of_a_user_with_verl_s_trainer_is_checked(runner: object) -> None:
    """Fault: a script that called run_ppo without validate_config trained unchecked, with patches switched off."""
    with pytest.raises(_Launched):
        main_ppo.run_ppo(changed("cispo", {}), runner)
    assert is_checked()
    with pytest.raises(startup.RefusedRunError, match="eps_max"):
        main_ppo.run_ppo(
            changed("cispo", {"actor_rollout_ref.actor.policy_loss.eps_max": -1}), task_runner_class=runner
        )


@pytest.mark.usefixtures("launches")
def test_verl_s_old_task_runner_is_refused_whoever_launches_it() -> None:
    """Recipes derive theirs from it; ``trainer.use_v1`` stays True in their config."""
    from verl.trainer.main_ppo_v0 import BaseTaskRunner

    class RecipeTaskRunner(BaseTaskRunner):
        pass

    with pytest.raises(startup.RefusedRunError, match=f"RecipeTaskRunner {NO_TRAINER}"):
        main_ppo.run_ppo(changed("recipe", {}), task_runner_class=ray.remote(RecipeTaskRunner))
    assert not is_checked()


@pytest.mark.usefixtures("launches")
def test_old_task_runner_of_a_run_without_our_names_starts() -> None:
    from verl.trainer.main_ppo_v0 import TaskRunner

    with pytest.raises(_Launched):
        main_ppo.run_ppo(changed("", {}), task_runner_class=TaskRunner)
    assert not is_checked()


@pytest.mark.usefixtures("launches")
def test_config_that_passed_is_not_checked_twice(capsys: pytest.CaptureFixture[str]) -> None:
    from verl.utils.config import validate_config

    config = changed("cispo", {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1})
    config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu = 1
    validate_config(config=config, use_reference_policy=False, use_critic=False)
    with pytest.raises(_Launched):
        main_ppo.run_ppo(config, task_runner_class=main_ppo.TaskRunnerV1)
    assert capsys.readouterr().err.count("[scalerl_verl] active:") == 1
