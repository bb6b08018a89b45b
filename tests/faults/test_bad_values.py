# SPDX-License-Identifier: Apache-2.0
"""Values of the wrong type: all problems at once with the key to change, never a traceback from a check."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf, open_dict

from scalerl_verl.cli import main
from scalerl_verl.config.checks import find_problems
from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.names.asking import asked_names
from scalerl_verl.names.numbers import NUMBERS, SWITCHES, check_numbers, number
from tests.unit.composed import ACTOR, HEAD_DTYPE, ROLLOUT, changed, compose_config

WEIRD = ("", "abc", "16", -5, 1.5, None, [1], {"a": 1}, True, "${nowhere.x}", "${oc.env:NO_SUCH_VARIABLE}")


def problems_of(path: str, value: Any, preset: str = "recipe") -> list[str]:
    config = compose_config(f"+scalerl={preset}", f"{ACTOR}.use_dynamic_bsz=True")
    with open_dict(config):
        OmegaConf.update(config, path, value, merge=False, force_add=True)
    return find_problems(config)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (f"{ROLLOUT}.n", "sixteen", "'sixteen': give a whole number of 1 or more"),
        (f"{ROLLOUT}.n", "16", "'16': give a whole number of 1 or more; write it without quotes"),
        (f"{ROLLOUT}.n", 16.0, "16.0: write 16"),
        (f"{ROLLOUT}.n", True, "True: give a whole number"),
        ("data.max_response_length", "14k", "'14k': give a whole number of 1 or more"),
        ("trainer.n_gpus_per_node", "", "'': give a whole number of 1 or more"),
        ("trainer.n_gpus_per_node", 0, "0: give a whole number of 1 or more"),
        ("trainer.nnodes", None, "null: give a whole number of 1 or more"),
        (f"{ROLLOUT}.gpu_memory_utilization", 72, "72: give a number of 0 or more up to 1"),
        (f"{ACTOR}.optim.lr", float("nan"), "nan: give a number of 0 or more"),
        (f"{ACTOR}.use_kl_loss", "no", "'no': give True or False"),
        ("trainer.val_only", "no", "'no': give True or False"),
        ("data.shuffle", "no", "'no': give True or False"),
        ("actor_rollout_ref.model.lora.merge", "True", "'True': give True or False"),
        (f"{ROLLOUT}.disaggregation.enabled", "no", "'no': give True or False"),
        (f"{ACTOR}.loss_agg_mode", ["prompt-mean"], "['prompt-mean']: give one word, without brackets"),
        ("trainer.v1.trainer_mode", ["sync"], "['sync']: give one word, without brackets"),
        ("algorithm.adv_estimator", {"scalerl": {}}, "{'scalerl': {}}: give one word, without brackets"),
        ("reward.reward_manager.name", ["dapo"], "['dapo']: give one word, without brackets"),
        (f"{ROLLOUT}.n", "${nowhere.x}", "Interpolation key 'nowhere.x' not found"),
        (f"{ROLLOUT}.agent", "forced_interruption", "'forced_interruption': it is a section, set the keys below it"),
        (f"{ACTOR}.policy_loss", "scalerl_cispo", "'scalerl_cispo': it is a section, set the keys below it"),
        (f"{ROLLOUT}.agent", None, "null: it is a section, set the keys below it or leave it out"),
        ("trainer.v1", None, "null: it is a section"),
        ("trainer.v1.sync", None, "null: it is a section, set the keys below it or leave it out"),
        (ACTOR, None, "null: it is a section"),
        (f"{ACTOR}.fsdp_config.fsdp_size", 0, "0: give a whole number of 1 or more, or -1"),
        ("trainer.v1.separate_async.parameter_sync_step", 0, "0: give a whole number of 1 or more"),
        ("trainer.use_v1", None, "null: give True or False"),
        (HEAD_DTYPE, "${oc.env:NO_SUCH_VARIABLE}", "Environment variable 'NO_SUCH_VARIABLE' not found"),
        ("trainer.v1.trainer_mode", "pipeline", "does not exist: did you mean pipeline_rl?"),
        ("trainer.v1.trainer_mode", "off_policy", "does not exist: did you mean ppo_off_policy?"),
        (f"{ACTOR}.loss_agg_mode", "prompt", "does not exist: did you mean prompt-mean?"),
    ],
)
def test_one_wrong_value_is_one_problem_with_what_is_allowed(path: str, value: Any, says: str) -> None:
    (problem,) = problems_of(path, value)
    assert problem.startswith(f"{path}=") and says in problem


def test_data_without_keys_is_said_and_no_traceback() -> None:
    assert any(text.startswith("data=null: it is a section") for text in problems_of("data", None))


@pytest.mark.parametrize(("mode", "preset"), [("pipeline_rl", "pipeline"), ("ppo_off_policy", "ppo_off_policy")])
@pytest.mark.parametrize("value", [0, 2, True, "x", [1], float("nan")])
def test_number_of_updates_between_weight_versions_is_one_problem(mode: str, preset: str, value: Any) -> None:
    """Fault: 0, a text and a list ended the check in an error of Python's, and True passed."""
    path = f"trainer.v1.{mode}.parameter_sync_step"
    (problem,) = find_problems(changed(preset, {path: value}))
    assert problem.startswith(f"{path}=") and "leave it 1" in problem


@pytest.mark.parametrize(
    "path", ["algorithm.scalerl.pass_threshold", "algorithm.scalerl.reward_shaping.length_penalty.max_length"]
)
def test_whole_number_beyond_every_float_is_one_problem(path: str) -> None:
    """Fault: the check ended in an OverflowError."""
    (problem,) = find_problems(changed("recipe", {path: 10**400}))
    assert problem.startswith(f"{path}=1000") and "quotes" not in problem


def test_key_with_a_dot_in_it_is_no_path() -> None:
    """Fault: verl's plans of layers are keyed by names of modules, and the check ended in a TypeError."""
    config = changed("cispo", {})
    plan = {"model.embed_tokens": {}, "lm_head": {"dtype": "${nowhere.x}"}, "model.layers.{*}": ["${nowhere.y}"]}
    with open_dict(config):
        config.actor_rollout_ref.actor.fsdp_config["apply_modules"] = plan
    found = find_problems(config)
    assert len(found) == 2 and "nowhere.x" in found[0] and "nowhere.y" in found[1]


def test_null_asks_for_none_of_our_names_and_null_stays_where_verl_has_a_meaning_for_it() -> None:
    assert problems_of("critic.enable", None) == []
    assert asked_names(changed("", {"trainer.v1": None, HEAD_DTYPE: "${nowhere.x}"})) == {}


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        (
            "scalerl",
            {"trainer.v1.pipeline_rl.k": 8, "trainer.v1.pipeline_rl.max_staleness": "eight"}
            | {"trainer.v1.pipeline_rl.max_attempts": 0},
        ),
        (
            "recipe",
            {"algorithm.scalerl.bogus": 1, "algorithm.scalerl.adv_norm": "x"}
            | {"algorithm.scalerl.interruption.k": 1, "algorithm.scalerl.interruption.seed": "x"}
            | {"algorithm.scalerl.truncation_alarm.k": 1, "algorithm.scalerl.truncation_alarm.fraction": 2}
            | {"algorithm.scalerl.reward_shaping.bogus": {}, "algorithm.scalerl.reward_shaping.length_penalty.k": 1}
            | {"algorithm.scalerl.reward_shaping.length_penalty.max_length": "x"},
        ),
    ],
)
def test_unknown_key_hides_no_wrong_value_of_its_section(preset: str, changes: dict[str, Any]) -> None:
    problems = find_problems(changed(preset, {f"{ACTOR}.use_dynamic_bsz": True, **changes}))
    assert len(problems) == len(changes), problems
    for path in changes:
        assert sum(path in problem for problem in problems) == 1, path


@pytest.mark.parametrize(("mode", "preset"), [("pipeline_rl", "scalerl"), ("ppo_off_policy", "ppo_off_policy")])
@pytest.mark.parametrize("value", [None, [1], "x"])
def test_settings_of_the_trainer_mode_that_are_no_section_are_one_problem(mode: str, preset: str, value: Any) -> None:
    path = f"trainer.v1.{mode}"
    (problem,) = problems_of(path, value, preset)
    assert problem.startswith(f"{path}=") and "section" in problem


def test_plan_shows_what_hydra_refuses_in_any_way(capsys: pytest.CaptureFixture[str]) -> None:
    for override in ("algorithm=null", "trainer.nnodes=[1", "foo"):
        assert main(["plan", override]) == 1
        assert "error: the config cannot be composed: " in capsys.readouterr().err


def test_value_that_others_refer_to_is_reported_once_and_where_it_stands() -> None:
    (problem,) = problems_of("data.train_batch_size", "48 prompts")
    assert problem.startswith("data.train_batch_size=")


def test_every_number_and_switch_of_verl_s_own_config_is_allowed_as_it_comes() -> None:
    config = compose_config()
    assert check_numbers(config) == ({}, config)
    present = [path for path in (*NUMBERS, *SWITCHES) if OmegaConf.select(config, path, default="absent") != "absent"]
    assert len(present) > 50, "the tables name keys that verl does not have"


def test_reader_of_one_number_gives_its_default_or_refuses() -> None:
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"n": "x", "top_k": None, "max_model_len": None}}})
    assert number(config, f"{ROLLOUT}.temperature") == 1.0
    assert number(config, f"{ROLLOUT}.max_model_len") is None
    for path in (f"{ROLLOUT}.n", f"{ROLLOUT}.top_k"):
        with pytest.raises(ScaleRLConfigError, match=path):
            number(config, path)


def leaves(section: Any, path: str = "") -> list[str]:
    if isinstance(section, dict) and section:
        below = [leaf for key, value in section.items() for leaf in leaves(value, f"{path}.{key}".lstrip("."))]
        return [*([path] if path else []), *below]
    return [path]


@pytest.mark.parametrize("preset", ["scalerl", "[grpo,ppo_off_policy,curriculum]"])
def test_checks_survive_whatever_stands_anywhere(preset: str) -> None:
    config = compose_config(f"+scalerl={preset}")
    paths = [path for path in leaves(OmegaConf.to_container(config, resolve=False)) if "-" not in path]
    places = random.Random(0).sample([(path, value) for path in paths for value in WEIRD], 50)
    for path, value in places:
        broken = compose_config(f"+scalerl={preset}")
        with open_dict(broken):
            OmegaConf.update(broken, path, value, merge=False)
        asked_names(broken)
        assert all(isinstance(problem, str) for problem in find_problems(broken)), (path, value)


def test_run_is_refused_once_with_all_problems_and_without_a_traceback(tmp_path: Path) -> None:
    overrides = [
        "+scalerl=recipe",
        f"{ROLLOUT}.n=sixteen",
        "data.max_response_length=14k",
        "trainer.n_gpus_per_node=",
        "trainer.nnodes=0",
        "reward_model.reward_manager=dapo",
        "sandbox_fusion.url=http://sandbox",
        f"actor_rollout_ref.model.path={tmp_path}/absent",
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SCALERL_", "HYDRA_"))}
    environment |= {"PYTHONPATH": os.environ.get("PYTHONPATH") or str(Path.cwd()), "VERL_PLATFORM": ""}
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *overrides],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    refusal = done.stderr[done.stderr.index("scalerl_verl refuses to start this run:") :]
    for override in overrides[1:]:
        key = override.partition("=")[0]
        assert refusal.count(f" {key}=") == 1, (key, refusal)
    assert "set reward.reward_manager.name=dapo instead" in refusal
    assert "Started a local Ray instance" not in done.stderr
