# SPDX-License-Identifier: Apache-2.0
"""What the two trainer modes refuse at start, on verl's real config."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl_verl.config.checks import find_problems
from scalerl_verl.upstream.activation import PLATFORM_ENV
from tests.unit.composed import ACTOR, MODEL, ROLLOUT, changed, compose_config

pytestmark = pytest.mark.usefixtures("clean_environment")
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"

REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"trainer.v1.pipeline_rl.max_stalenes": 4}, "max_stalenes does not exist"),
    "bound below 0": ({"trainer.v1.pipeline_rl.max_staleness": -1}, "0 or more (0 is on-policy)"),
    "section that is a number": ({"trainer.v1.pipeline_rl": 8}, "it is a section, set the keys below it"),
    "section of the other mode": (
        {"trainer.v1.ppo_off_policy.num_updates": 8},
        "trainer.v1.ppo_off_policy is read by trainer.v1.trainer_mode=ppo_off_policy only",
    ),
    "recomputed log-probs": (
        {"algorithm.rollout_correction.bypass_mode": False},
        "bypass_mode=False with trainer.v1.trainer_mode=pipeline_rl",
    ),
    "no log-probs": ({f"{ROLLOUT}.calculate_log_probs": False}, "calculate_log_probs=False records no log-probs"),
    "two updates a version": ({f"{ACTOR}.ppo_mini_batch_size": 128}, "every optimizer step is a version"),
    "two epochs a batch": ({f"{ACTOR}.ppo_epochs": 2}, f"{ACTOR}.ppo_epochs=2"),
    "hybrid engine": ({"actor_rollout_ref.hybrid_engine": True}, "has to stop for every step"),
    "no devices to generate": ({f"{ROLLOUT}.n_gpus_per_node": 0}, "generators need devices of their own"),
    "tensor parallelism over nodes": (
        {f"{ROLLOUT}.tensor_model_parallel_size": 3},
        "set actor_rollout_ref.rollout.n_gpus_per_node to the GPUs of a node that generate, a multiple of 3",
    ),
    "tensor parallelism behind verl's back": ({f"{VLLM}.tensor_parallel_size": 2}, "by which verl counts"),
    "data parallelism": ({f"{ROLLOUT}.data_parallel_size": 2}, "engines of one rank"),
    "pipeline parallelism": ({f"{ROLLOUT}.pipeline_model_parallel_size": 2}, "engines of one rank"),
    "LoRA": ({f"{MODEL}.lora_rank": 8}, "model.lora_rank: adapters apart"),
    "LoRA of the new section": ({f"{MODEL}.lora.rank": 8}, "set actor_rollout_ref.model.lora.merge=True"),
    "adapter from a file": ({f"{MODEL}.lora_adapter_path": "adapter"}, "lora_adapter_path: adapters apart"),
    "another engine": ({f"{ROLLOUT}.name": "sglang"}, f"{ROLLOUT}.name=sglang"),
    "another backend": ({f"{ROLLOUT}.checkpoint_engine.backend": "nixl"}, "use one of gloo, nccl"),
    "colocated backend": ({f"{ROLLOUT}.checkpoint_engine.backend": "naive"}, "use one of gloo, nccl"),
    "process group that cannot shrink": (
        {f"{ROLLOUT}.checkpoint_engine.engine_kwargs.nccl.rebuild_group": False},
        "fail on another size once a generator has died",
    ),
    "prefill apart": ({f"{ROLLOUT}.disaggregation.enabled": True}, "apart from its decoder"),
    "draft model": ({f"{VLLM}.speculative_config": {"method": "ngram"}}, "a draft model is not updated"),
    "external KV store": ({f"{VLLM}.kv_transfer_config": {"kv_connector": "x"}}, "does not know weight versions"),
    "quantised generator": ({f"{ROLLOUT}.quantization": "fp8"}, "quantised again on loading"),
    "quantised generator behind verl's back": ({f"{VLLM}.quantization": "fp8"}, "vllm.quantization=fp8 with trainer"),
    "offloaded KV": ({f"{VLLM}.kv_offloading_size": 4}, "does not know weight versions"),
    "adapters behind verl's back": ({f"{VLLM}.enable_lora": True}, "enable_lora=True"),
    "experts that move": ({f"{VLLM}.enable_eplb": True}, "enable_eplb=True"),
    "context parallelism": ({f"{VLLM}.prefill_context_parallel_size": 2}, "verified for tensor parallelism"),
    "dynamic sampling by nothing": (
        {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": None},
        "algorithm.filter_groups.metric=None with",
    ),
    "another sampler": ({"trainer.v1.sampler.custom_sampler.path": "x.py"}, "the admission rule is the sampler"),
    "another balancer": ({f"{ROLLOUT}.router_config_path": "router.yaml"}, "its load balancer is its own"),
    "equal request ids": ({f"{ROLLOUT}.full_determinism": True}, "requests need ids of their own"),
    "colocated reward model": (
        {
            "reward.reward_model.enable": True,
            "reward.reward_model.model_path": "Skywork/R",
            "reward.reward_model.rollout.name": "vllm",
        },
        "a reward model needs devices of its own",
    ),
}


@pytest.mark.fault("other micro-batches, ranks or token budgets: another loss, or a gradient scaled by the ranks")
@pytest.mark.parametrize("case", REFUSALS)
def test_pipeline_run_that_would_go_wrong_is_refused(case: str) -> None:
    changes, expected = REFUSALS[case]
    preset = "[setup,cispo,prompt_mean,advantage,pipeline]"
    if "bypass" in str(changes):
        preset = "[prompt_mean,pipeline]"
    if "calculate_log_probs" in str(changes):
        preset = "pipeline"
    problems = find_problems(changed(preset, changes))
    assert len(problems) == 1 and expected in problems[0], problems


@pytest.mark.parametrize(
    "presets", ["pipeline", "scalerl", "[recipe,pipeline]", "[recipe,pipeline,curriculum]", "[gspo,pipeline]"]
)
def test_pipeline_goes_with_the_recipe_and_the_baselines(presets: str) -> None:
    assert find_problems(changed(presets, {})) == []


@pytest.mark.parametrize("presets", ["[recipe,pipeline]", "[dapo,pipeline]", "[dapo,pipeline,curriculum]"])
def test_dynamic_sampling_goes_with_the_recipe_in_this_mode(presets: str) -> None:
    """Whose zero_variance=drop finds nothing to drop then, and whose curriculum learns of what was rejected."""
    assert find_problems(changed(presets, {"algorithm.filter_groups.enable": True})) == []


def test_several_turns_and_tools() -> None:
    changes = {
        f"{ROLLOUT}.multi_turn.enable": True,
        f"{ROLLOUT}.multi_turn.function_tool_path": "tools.py",
        f"{ROLLOUT}.agent.default_agent_loop": "tool_agent",
    }
    assert find_problems(changed("[setup,cispo,prompt_mean,advantage,pipeline]", changes)) == []
    (problem,) = find_problems(changed("scalerl", {f"{ROLLOUT}.multi_turn.function_tool_path": "tools.py"}))
    assert "forced_interruption answers in a single turn and would never call a tool" in problem


def test_adapters_go_merged() -> None:
    changes = {f"{MODEL}.lora_rank": 8, f"{MODEL}.lora.merge": True, f"{MODEL}.lora_adapter_path": "adapter"}
    assert find_problems(changed("scalerl", changes)) == []


def test_number_of_generated_batches_has_to_be_a_number() -> None:
    (problem,) = find_problems(changed("scalerl", {"algorithm.filter_groups.max_num_gen_batches": "ten"}))
    assert "algorithm.filter_groups.max_num_gen_batches='ten'" in problem


def test_preset_scalerl_is_recipe_and_pipeline() -> None:
    assert compose_config("+scalerl=scalerl") == compose_config("+scalerl=[recipe,pipeline]")


def test_pipeline_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLATFORM_ENV, "cpu")
    assert find_problems(compose_config("+scalerl=[recipe,pipeline,cpu]")) == []
    (problem,) = find_problems(compose_config("+scalerl=[recipe,pipeline,cpu]", f"{ROLLOUT}.n_gpus_per_node=2"))
    assert "this run needs 3" in problem


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"trainer.v1.ppo_off_policy.num_updates": 4}, "set train_batch_size to 192"),
        ({"data.train_batch_size": 48}, "set train_batch_size to 384"),
        ({f"{ACTOR}.ppo_epochs": 2}, "set ppo_epochs to 1"),
        ({"algorithm.rollout_correction.bypass_mode": False}, "bypass_mode=False with trainer.v1.trainer_mode"),
        ({"trainer.v1.pipeline_rl.max_staleness": 1}, "trainer.v1.pipeline_rl is read by"),
    ],
)
def test_off_policy_run_that_would_go_wrong_is_refused(changes: dict[str, Any], expected: str) -> None:
    problems = find_problems(changed("ppo_off_policy", changes))
    assert any(expected in problem for problem in problems), problems


def test_off_policy_takes_the_slots_of_a_colocated_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLATFORM_ENV, "cpu")
    config = compose_config("+scalerl=[ppo_off_policy,cpu]", "ray_kwargs.ray_init.num_gpus=1")
    assert find_problems(config) == []
