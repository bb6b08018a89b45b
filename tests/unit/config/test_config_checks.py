# SPDX-License-Identifier: Apache-2.0
"""The start-up check on verl's real config, composed through Hydra with and without our presets."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import verl  # noqa: F401 - loads the plugin, which puts our presets on Hydra's search path
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass

import scalerl_verl.configs
from benchmarks.reference.baselines import flatten
from scalerl_verl.config.checks import find_problems
from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.loss.verl_config import ScaleRLFSDPActorConfig, ScaleRLPolicyLossConfig
from scalerl_verl.names import SAMPLER_CLASS
from scalerl_verl.names.asking import asked_names
from scalerl_verl.upstream.activation import ACTIVE_ENV, PLATFORM_ENV
from scalerl_verl.verl import startup
from tests.unit.composed import ACTOR, CORRECTION, ROLLOUT, Refusal, changed, check_refusal, compose_config

pytestmark = pytest.mark.usefixtures("clean_environment")

PRESETS = sorted(path.stem for path in Path(scalerl_verl.configs.__file__).parent.glob("scalerl/*.yaml"))
ON_CPU = ("cpu", "quickstart")
PLAIN_VERL = ("drgrpo", "grpo", "gspo", "reinforce_tis", "sampling_ratio", "setup")
"""Presets of verl's own names only: such a run must stay verl's alone."""
GOLDEN = Path(__file__).with_name("golden_keys.txt")


def test_the_presets_are_those_of_the_configs_folder() -> None:
    assert {"recipe", "cispo", "prompt_mean", "advantage", "curriculum", "cpu", "quickstart"} <= set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_composes_and_contradicts_nothing(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if preset in ON_CPU:
        monkeypatch.setenv(PLATFORM_ENV, "cpu")
    # verl's default is one response a prompt, which no group baseline can work with.
    config = changed(preset, {f"{ROLLOUT}.n": 4} if preset == "advantage" else {})
    assert find_problems(config) == []
    assert bool(asked_names(config)) is (preset not in PLAIN_VERL), "a preset with a name of ours is a run of ours"


@pytest.mark.parametrize("preset", PLAIN_VERL)
def test_preset_of_verl_s_own_names_leaves_the_run_to_verl(preset: str, only_config_checks: list[str]) -> None:
    config = changed(preset, {})
    before = OmegaConf.to_yaml(config)
    assert startup.prepare_run(config) == {}
    assert OmegaConf.to_yaml(config) == before
    assert only_config_checks == [] and ACTIVE_ENV not in os.environ


def test_unknown_preset_is_refused_with_the_available_ones() -> None:
    with pytest.raises(MissingConfigException) as error:
        compose_config("+scalerl=nope")
    assert "scalerl/nope" in str(error.value)
    assert all(f"\t{preset}\n" in str(error.value) for preset in PRESETS)


def test_config_of_verl_alone_asks_for_nothing_of_ours() -> None:
    assert asked_names(compose_config()) == {}
    assert find_problems(compose_config()) == []


PIECES = {
    "loss": f"{ACTOR}.policy_loss.loss_mode",
    "aggregation": f"{ACTOR}.loss_agg_mode",
    "normalisation": "algorithm.scalerl.adv_norm",
    "filtering": "algorithm.scalerl.zero_variance",
    "curriculum": "data.sampler.class_path",
}
LEAVE_ONE_OUT = {
    "loss": [f"{PIECES['loss']}=vanilla", f"~{ACTOR}.policy_loss.eps_max"],
    "aggregation": [f"{PIECES['aggregation']}=token-mean"],
    "normalisation": [f"{PIECES['normalisation']}=prompt"],
    "filtering": [f"{PIECES['filtering']}=keep"],
    "curriculum": ["~data.sampler"],
}
"""Piece of the recipe -> a user's overrides that leave it out."""
REFUSALS: dict[str, Refusal] = {
    "misspelt estimator": (
        "",
        {"algorithm.adv_estimator": "scalerl_adv"},
        ["algorithm.adv_estimator=scalerl_adv does not exist"],
    ),
    "misspelt trainer mode": (
        "",
        {"trainer.v1.trainer_mode": "pipelinerl"},
        ["trainer.v1.trainer_mode=pipelinerl does not exist: did you mean pipeline_rl?"],
    ),
    "old trainer": ("recipe", {"trainer.use_v1": False}, ["trainer.use_v1=False", "set trainer.use_v1=True"]),
    "unknown key of our section": (
        "recipe",
        {"algorithm.scalerl.adv_nrom": "batch"},
        ["algorithm.scalerl.adv_nrom does not exist", "adv_norm, zero_variance"],
    ),
    "our section in other letters": (
        "recipe",
        {"algorithm.scaleRL": {"zero_variance": "keep"}},
        ["algorithm.scaleRL has no effect", "algorithm.scalerl.adv_norm"],
    ),
    "setting beside its section": ("recipe", {"algorithm.adv_norm": "none"}, ["algorithm.adv_norm has no effect"]),
    "key of a mode beside its section": (
        "pipeline",
        {"trainer.v1.lead": "full"},
        ["trainer.v1.lead has no effect", "set trainer.v1.pipeline_rl.lead"],
    ),
    "preset group as a key": ("recipe", {"scalerl": "recipe"}, ["top-level key scalerl has no effect"]),
    "preset group in other letters": (
        "",
        {"ScaleRL": "recipe"},
        ["top-level key ScaleRL has no effect", "+scalerl=NAME"],
    ),
    "preset group in two words": ("", {"scale_rl": "recipe"}, ["top-level key scale_rl has no effect"]),
    "preset as part of a key": ("", {"scalerl_recipe": True}, ["top-level key scalerl_recipe has no effect"]),
    "settings of a mode in no section": (
        "pipeline",
        {"pipeline_rl.max_staleness": 4},
        ["pipeline_rl does not exist", "trainer.v1.pipeline_rl?"],
    ),
    "settings of a mode above theirs": (
        "ppo_off_policy",
        {"trainer.ppo_off_policy.num_updates": 4},
        ["trainer.ppo_off_policy does not exist", "trainer.v1.ppo_off_policy?"],
    ),
    "section that is a word": ("recipe", {"algorithm.scalerl": "drop"}, ["algorithm.scalerl='drop': it is a section"]),
    "estimator with a letter missing": (
        "",
        {"algorithm.adv_estimator": "scalrl"},
        ["adv_estimator=scalrl", "scalerl?"],
    ),
    "poll interval under another key": (
        "recipe",
        {"trainer.v1.sampler.sampler_kwargs.poll_interval": 1},
        ["sampler_kwargs.poll_interval has no effect", "poll_interval_s"],
    ),
    "poll interval beside its section": (
        "recipe",
        {"trainer.v1.sampler.poll_interval_s": 1},
        ["trainer.v1.sampler.poll_interval_s has no effect"],
    ),
    "negative poll interval": (
        "recipe",
        {"trainer.v1.sampler.sampler_kwargs.poll_interval_s": -1},
        ["poll_interval_s=-1", "positive"],
    ),
    "poll interval without end": (
        "recipe",
        {"trainer.v1.sampler.sampler_kwargs.poll_interval_s": float("inf")},
        ["poll_interval_s=inf", "positive"],
    ),
    "poll interval of another buffer": (
        "recipe",
        {"trainer.v1.sampler.sampler_kwargs.poll_interval_s": 1, "trainer.v1.sampler.custom_sampler.path": "mine.py"},
        ["poll_interval_s", "mine.py"],
    ),
    "another entry point of verl": ("recipe", {"async_training.x": 1}, ["verl.trainer.main_ppo"]),
    "CPU without its platform": ("recipe", {"trainer.device": "cpu"}, ["trainer.device=cpu", f"{PLATFORM_ENV}=cpu"]),
    "misspelt agent loop": (
        "",
        {f"{ROLLOUT}.agent.default_agent_loop": "forced-interuption"},
        [f"{ROLLOUT}.agent.default_agent_loop=forced-interuption does not exist", "forced_interruption"],
    ),
    "interruption without its loop": (
        "recipe",
        {f"{ROLLOUT}.agent.default_agent_loop": "single_turn_agent", "algorithm.scalerl.interruption.seed": 1},
        ["algorithm.scalerl.interruption is read by", f"{ROLLOUT}.agent.default_agent_loop=forced_interruption"],
    ),
    "unknown key of interruption": (
        "interruption",
        {"algorithm.scalerl.interruption.budget": 5},
        ["algorithm.scalerl.interruption.budget does not exist", "thinking_budget, answer_budget"],
    ),
    "thinking budget the wrong way round": (
        "interruption",
        {"algorithm.scalerl.interruption.thinking_budget": [12, 10]},
        ["algorithm.scalerl.interruption.thinking_budget=(12, 10): give [low, high]"],
    ),
    "phrase that does not close": (
        "interruption",
        {"algorithm.scalerl.interruption.phrase": "Stop."},
        ["algorithm.scalerl.interruption.phrase='Stop.' must contain end_marker='</think>' once"],
    ),
    "interruption beside the section": (
        "recipe",
        {"algorithm.interruption": {"seed": 1}},
        ["algorithm.interruption has no effect", "algorithm.scalerl."],
    ),
    "tools in a single turn": (
        "interruption",
        {f"{ROLLOUT}.multi_turn.tool_config_path": "tools.yaml"},
        [f"{ROLLOUT}.multi_turn.tool_config_path is set", "tool_agent"],
    ),
    "no prefix cache": (
        "interruption",
        {f"{ROLLOUT}.enable_prefix_caching": False},
        [f"{ROLLOUT}.enable_prefix_caching=False", "set it True"],
    ),
    "no prefix cache by vLLM's own key": (
        "interruption",
        {f"{ROLLOUT}.engine_kwargs.vllm.enable_prefix_caching": False},
        [f"{ROLLOUT}.engine_kwargs.vllm.enable_prefix_caching=False", "set it True"],
    ),
    "dynamic sampling without a metric": (
        "cispo",
        {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": None},
        ["algorithm.filter_groups.metric=None with algorithm.filter_groups.enable=True", "set it to reward"],
    ),
    "routing replay": (
        "interruption",
        {f"{ROLLOUT}.enable_rollout_routing_replay": True, f"{ROLLOUT}.moe_load_balance_metrics_interval": 1},
        [f"{ROLLOUT}.enable_rollout_routing_replay=True", "set it False"],
    ),
    "an engine with less room than a response": (
        "interruption",
        {f"{ROLLOUT}.max_model_len": 1000, f"{ROLLOUT}.prompt_length": 512, f"{ROLLOUT}.response_length": 512},
        [f"{ROLLOUT}.max_model_len=1000 is less than", "1024"],
    ),
    "alarm that means nothing": (
        "recipe",
        {"algorithm.scalerl.truncation_alarm": {"fraction": 10, "on_alarm": "warn"}},
        ["algorithm.scalerl.truncation_alarm.fraction=10: give a number above 0 and below 1"],
    ),
    "misspelt sampler": (
        "",
        {"data.sampler.class_path": "scalerl_verl.curriculum.NoPositives"},
        ["data.sampler.class_path=scalerl_verl.curriculum.NoPositives does not exist", SAMPLER_CLASS],
    ),
    "sampler options without the sampler": (
        "cispo",
        {"data.sampler.threshold": 0.5},
        ["data.sampler=", "names no sampler", f"+data.sampler.class_path={SAMPLER_CLASS}"],
    ),
    "unknown option of the sampler": (
        "curriculum",
        {"data.sampler.treshold": 0.5},
        ["data.sampler.treshold does not exist", "threshold, history, first_epoch"],
    ),
    "pass rate above 1": ("curriculum", {"data.sampler.threshold": 90}, ["data.sampler.threshold=90", "at most 1"]),
    "unknown history": (
        "curriculum",
        {"data.sampler.history": "mean"},
        ["data.sampler.history='mean'", "latest, cumulative"],
    ),
    "filtering without a history": ("curriculum", {"data.sampler.first_epoch": 1}, ["data.sampler.first_epoch=1"]),
    "file that is none": ("curriculum", {"data.sampler.log_file": 3}, ["data.sampler.log_file=3", "path of a file"]),
    "floor below a batch": (
        "curriculum",
        {"data.sampler.min_prompts": 10, "data.train_batch_size": 48},
        ["data.sampler.min_prompts=10 is less than the 48 prompts", "48 or more"],
    ),
    "sampler that never sees what always passes": (
        "curriculum",
        {"algorithm.filter_groups.enable": True},
        ["algorithm.filter_groups.enable=True", "data.sampler", "set filter_groups.enable=False"],
    ),
    "refill with a sampler and verl's estimator": (
        "[dapo,curriculum]",
        {},
        ["set filter_groups.enable=False", "algorithm.adv_estimator=scalerl", "~data.sampler"],
    ),
}


@pytest.mark.fault("bypass mode replaces the configured loss")
@pytest.mark.parametrize("fault", REFUSALS)
def test_contradiction_is_refused_with_its_key(fault: str) -> None:
    check_refusal(*REFUSALS[fault])


def test_refill_in_the_recipe_is_refused_by_both_filters_it_competes_with() -> None:
    problems = find_problems(changed("recipe", {"algorithm.filter_groups.enable": True}))
    assert len(problems) == 2
    assert "algorithm.scalerl.zero_variance=drop" in problems[0] and "data.sampler" in problems[1]


def test_each_piece_of_the_recipe_can_be_left_out_by_overrides() -> None:
    """Leave-one-out, each piece replaced by what verl does without it; the others stay as they are."""
    recipe = compose_config("+scalerl=recipe")
    for piece, overrides in LEAVE_ONE_OUT.items():
        config = compose_config("+scalerl=recipe", *overrides)
        assert find_problems(config) == [], piece
        changes = {path for path in PIECES.values() if OmegaConf.select(config, path) != OmegaConf.select(recipe, path)}
        assert changes == {PIECES[piece]}


def test_sampler_gets_its_floor_and_file_from_the_rest_of_the_config(only_config_checks: list[str]) -> None:
    changes = {"data.train_batch_size": 48, "trainer.default_local_dir": "/tmp/run"}
    config = changed("curriculum", changes)
    startup.prepare_run(config)
    assert (config.data.sampler.min_prompts, config.data.sampler.log_file) == (48, "/tmp/run/curriculum.jsonl")
    named = compose_config(f"+data.sampler.class_path={SAMPLER_CLASS}")
    assert find_problems(named) == []
    given = changed("curriculum", {**changes, "data.sampler.min_prompts": 100, "data.sampler.log_file": "mine.jsonl"})
    startup.prepare_run(given)
    assert (given.data.sampler.min_prompts, given.data.sampler.log_file) == (100, "mine.jsonl")


def test_floor_below_a_batch_is_fine_where_prompts_are_fetched_one_by_one() -> None:
    changes = {"data.sampler.min_prompts": 10, "data.train_batch_size": 48, "trainer.v1.trainer_mode": "colocate_async"}
    assert find_problems(changed("curriculum", changes)) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("trainer.device", "cuda"),
        (f"{ACTOR}.strategy", "fsdp"),
        ("actor_rollout_ref.model.use_remove_padding", True),
        (f"{ROLLOUT}.enforce_eager", False),
        (f"{ROLLOUT}.enable_sleep_mode", True),
        (f"{ROLLOUT}.free_cache_engine", True),
    ],
)
def test_setting_that_cannot_work_on_the_cpu_is_refused(on_cpu: None, path: str, value: Any) -> None:
    (problem,) = find_problems(changed("cpu", {path: value}))
    assert f"{path}={value} with {PLATFORM_ENV}=cpu" in problem
    assert "+scalerl=cpu sets all of these" in problem


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"ray_kwargs.ray_init.num_gpus": 0}, 1),
        ({"ray_kwargs.ray_init.num_gpus": None}, 1),
        ({"ray_kwargs.ray_init.num_gpus": 2, "trainer.n_gpus_per_node": 3}, 3),
        ({"ray_kwargs.ray_init.num_gpus": 1, "trainer.v1.trainer_mode": "separate_async"}, 2),
    ],
)
def test_too_few_logical_slots_on_the_cpu_are_refused(on_cpu: None, changes: dict[str, Any], needed: int) -> None:
    (problem,) = find_problems(changed("cpu", changes))
    assert f"ray_kwargs.ray_init.num_gpus={changes['ray_kwargs.ray_init.num_gpus']}" in problem
    assert f"set +ray_kwargs.ray_init.num_gpus={needed}" in problem


def test_slots_of_an_existing_cluster_are_not_ours_to_judge(on_cpu: None) -> None:
    changes = {"ray_kwargs.ray_init.num_gpus": None, "ray_kwargs.ray_init.address": "10.0.0.1:6379"}
    assert find_problems(changed("cpu", changes)) == []


def test_all_problems_are_listed_at_once(only_config_checks: list[str]) -> None:
    changes = {
        "algorithm.scalerl.adv_norm": "x",
        "algorithm.scalerl.zero_variance": "y",
        f"{ROLLOUT}.n": 1,
        f"{ROLLOUT}.top_p": 0.9,
        "distillation.enabled": True,
    }
    with pytest.raises(ScaleRLConfigError) as error:
        startup.prepare_run(changed("recipe", changes))
    assert len(error.value.problems) == 5
    for key in ("adv_norm", "zero_variance", f"{ROLLOUT}.n", f"{ROLLOUT}.top_p", "distillation.enabled"):
        assert sum(key in problem.split(":")[0] for problem in error.value.problems) == 1, key
    assert "5. " in str(error.value)
    assert only_config_checks == [], "a refused run must not be activated"
    assert ACTIVE_ENV not in os.environ


def test_names_work_by_verl_s_plain_syntax_without_a_preset(only_config_checks: list[str]) -> None:
    config = compose_config(
        f"{ACTOR}.policy_loss.loss_mode=scalerl_cispo",
        f"+{ACTOR}.policy_loss.eps_max=4",
        f"{ACTOR}.loss_agg_mode=prompt-mean",
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{ROLLOUT}.calculate_log_probs=True",
        f"{CORRECTION}.bypass_mode=True",
    )
    asked = startup.prepare_run(config)
    assert asked == {
        f"{ACTOR}.policy_loss.loss_mode": "scalerl_cispo",
        f"{ACTOR}.loss_agg_mode": "prompt-mean",
        f"{ACTOR}.policy_loss.eps_max": "set",
    }
    section = omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
    assert type(section) is ScaleRLPolicyLossConfig
    assert section.eps_max == 4
    assert section.get("eps_max") == 4
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert type(actor) is ScaleRLFSDPActorConfig
    assert actor.loss_agg_mode == "prompt-mean" and actor.policy_loss.eps_max == 4
    # Values carry no prompt weight, whatever the critic's key follows.
    assert config.critic.loss_agg_mode == "token-mean"
    assert only_config_checks == ["activate"]
    assert os.environ[ACTIVE_ENV] == "1"
    assert config.ray_kwargs.ray_init.runtime_env.env_vars[ACTIVE_ENV] == "1"


def test_error_survives_pickling_as_ray_does_it() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(ScaleRLConfigError(["first", "second"])))
    assert error.problems == ("first", "second")
    assert str(error) == str(ScaleRLConfigError(["first", "second"]))


def _flat(config: DictConfig) -> dict[str, Any]:
    return dict(flatten(OmegaConf.to_container(config, resolve=False)))


def test_presets_change_exactly_the_keys_on_the_golden_list() -> None:
    default, absent = _flat(compose_config()), SimpleNamespace()
    lines = [
        f"{preset} {key}={json.dumps(value)}"
        for preset in PRESETS
        for key, value in sorted(_flat(compose_config(f"+scalerl={preset}")).items())
        if default.get(key, absent) != value
    ]
    if os.environ.get("UPDATE_GOLDEN") == "1":
        GOLDEN.write_text("\n".join(lines) + "\n")
    golden = GOLDEN.read_text().splitlines()
    missing, added = sorted(set(golden) - set(lines)), sorted(set(lines) - set(golden))
    assert not missing and not added, (
        f"gone: {missing}\nnew: {added}\nIf this is meant: UPDATE_GOLDEN=1 pytest {Path(__file__).name}, and review "
        f"the change of {GOLDEN.name}"
    )


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("algorithm.scalrl", "algorithm.scalerl"),
        ("trainer.v1.pipelinerl", "trainer.v1.pipeline_rl"),
        ("trainer.v1.pipeline", "trainer.v1.pipeline_rl"),
        ("trainer.v1.ppo_offpolicy", "trainer.v1.ppo_off_policy"),
    ],
)
def test_section_whose_name_is_misspelt_is_refused(path: str, meant: str) -> None:
    """Its settings would be ignored, and the defaults trained with."""
    check_refusal("", {path: {"max_staleness": 2}}, [path, f"did you mean {meant}"])
