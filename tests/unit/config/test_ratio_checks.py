# SPDX-License-Identifier: Apache-2.0
"""The start-up check of the importance ratio: our loss, and how log-probs are recorded wherever they are compared."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from scalerl_verl.loss.settings import PolicyLossSettings
from scalerl_verl.loss.verl_config import ScaleRLPolicyLossConfig
from scalerl_verl.verl import startup
from tests.unit.composed import ACTOR, CORRECTION, ROLLOUT, Refusal, changed, check_refusal, compose_config

pytestmark = pytest.mark.usefixtures("clean_environment")

REFUSALS: dict[str, Refusal] = {
    "misspelt loss": (
        "",
        {f"{ACTOR}.policy_loss.loss_mode": "scalerl_cipso"},
        [f"{ACTOR}.policy_loss.loss_mode=scalerl_cipso does not exist", "scalerl_cispo"],
    ),
    "cap of zero": ("recipe", {f"{ACTOR}.policy_loss.eps_max": 0}, [f"{ACTOR}.policy_loss.eps_max=0", "1 or more"]),
    "cap that is text": ("recipe", {f"{ACTOR}.policy_loss.eps_max": "5"}, [f"{ACTOR}.policy_loss.eps_max='5'"]),
    "range without 1": (
        "recipe",
        {f"{ACTOR}.policy_loss.token_mask_range": [1.5, 5.0]},
        [f"{ACTOR}.policy_loss.token_mask_range=[1.5, 5.0]", "low < 1 < high", "or null"],
    ),
    "unknown truncation of sequences": (
        "recipe",
        {f"{ACTOR}.policy_loss.sequence_truncation": "token"},
        [f"{ACTOR}.policy_loss.sequence_truncation='token'", "product, geometric_mean", "null"],
    ),
    "recomputed log-probs": ("recipe", {f"{CORRECTION}.bypass_mode": False}, [f"{CORRECTION}.bypass_mode=False"]),
    "second correction": ("recipe", {f"{CORRECTION}.rollout_is": "token"}, [f"{CORRECTION}.rollout_is", "null"]),
    "rejection": ("recipe", {f"{CORRECTION}.rollout_rs": "token_k1"}, [f"{CORRECTION}.rollout_rs", "null"]),
    "no sampling-time log-probs": (
        "recipe",
        {f"{ROLLOUT}.calculate_log_probs": False},
        [f"{ROLLOUT}.calculate_log_probs=False"],
    ),
    "greedy sampling": ("recipe", {f"{ROLLOUT}.temperature": 0}, [f"{ROLLOUT}.temperature=0", "above 0"]),
    "raw log-probs at another temperature": (
        "recipe",
        {f"{ROLLOUT}.temperature": 0.7, f"{ROLLOUT}.logprobs_mode": "raw_logprobs"},
        [f"{ROLLOUT}.logprobs_mode=raw_logprobs with temperature=0.7", "processed_logprobs"],
    ),
    "nucleus sampling": ("recipe", {f"{ROLLOUT}.top_p": 0.9}, [f"{ROLLOUT}.top_p=0.9", "top_p=1.0"]),
    "top-k sampling": ("recipe", {f"{ROLLOUT}.top_k": 40}, ["top_k=40", "top_k=-1"]),
    "half precision": ("recipe", {f"{ROLLOUT}.dtype": "half"}, [f"{ROLLOUT}.dtype=half", "bfloat16 or float32"]),
    "half precision through the engine's own arguments": (
        "recipe",
        {f"{ROLLOUT}.engine_kwargs.vllm.dtype": "float16"},
        [f"{ROLLOUT}.engine_kwargs.vllm.dtype=float16", "bfloat16 or float32"],
    ),
    "cap of a loss that is not in use": (
        "recipe",
        {f"{ACTOR}.policy_loss.loss_mode": "vanilla"},
        [f"{ACTOR}.policy_loss.eps_max", "loss_mode=vanilla", f"~{ACTOR}.policy_loss.eps_max"],
    ),
    "loss in capitals": (
        "",
        {f"{ACTOR}.policy_loss.loss_mode": "ScaleRL_CISPO"},
        [f"{ACTOR}.policy_loss.loss_mode=ScaleRL_CISPO does not exist", "scalerl_cispo"],
    ),
    "log-probs that are logits": (
        "recipe",
        {f"{ROLLOUT}.logprobs_mode": "raw_logits"},
        [f"{ROLLOUT}.logprobs_mode=raw_logits", "processed_logprobs"],
    ),
    "raw log-probs through the engine's own arguments": (
        "recipe",
        {f"{ROLLOUT}.temperature": 0.7, f"{ROLLOUT}.engine_kwargs.vllm.logprobs_mode": "raw_logprobs"},
        [
            f"{ROLLOUT}.engine_kwargs.vllm.logprobs_mode=raw_logprobs with temperature=0.7",
            f"set {ROLLOUT}.engine_kwargs.vllm.logprobs_mode=processed_logprobs",
        ],
    ),
    "DAPO with nucleus sampling": (
        "dapo",
        {f"{ROLLOUT}.top_p": 0.7},
        [f"{ROLLOUT}.top_p=0.7", f"{CORRECTION}.bypass_mode=True", "set top_p=1.0 and top_k=-1"],
    ),
    "MiniMax's CISPO with truncated sampling": (
        "cispo_minimax",
        {f"{ROLLOUT}.top_p": 0.7, f"{ROLLOUT}.top_k": 20},
        [f"{ROLLOUT}.top_p=0.7, top_k=20", "set top_p=1.0 and top_k=-1"],
    ),
    "DAPO with raw log-probs at another temperature": (
        "dapo",
        {f"{ROLLOUT}.temperature": 0.7, f"{ROLLOUT}.logprobs_mode": "raw_logprobs"},
        [f"{ROLLOUT}.logprobs_mode=raw_logprobs with temperature=0.7", "=processed_logprobs"],
    ),
    "our advantages with verl's loss and nucleus sampling": (
        "[sampling_ratio,setup,advantage]",
        {f"{ACTOR}.policy_loss.loss_mode": "vanilla", f"{ROLLOUT}.top_p": 0.7},
        [f"{ROLLOUT}.top_p=0.7", "top_p=1.0"],
    ),
    "DAPO without sampling-time log-probs": (
        "dapo",
        {f"{ROLLOUT}.calculate_log_probs": False},
        [f"{ROLLOUT}.calculate_log_probs=False", "set it True"],
    ),
    "FP32 head without sampling-time log-probs": (
        "fp32_head",
        {f"{ROLLOUT}.calculate_log_probs": False},
        [f"{ROLLOUT}.calculate_log_probs=False", "FP32 head", "set it True"],
    ),
    "GRPO with the FP32 head and nucleus sampling": (
        "[grpo,fp32_head]",
        {f"{ROLLOUT}.top_p": 0.7},
        [f"{ROLLOUT}.top_p=0.7", "top_p=1.0"],
    ),
    "GRPO with the FP32 head and raw log-probs": (
        "[grpo,fp32_head]",
        {f"{ROLLOUT}.temperature": 0.6, f"{ROLLOUT}.logprobs_mode": "raw_logprobs"},
        [f"{ROLLOUT}.logprobs_mode=raw_logprobs with temperature=0.6"],
    ),
    "FP32 head compared with logits": (
        "[fp32_head,setup]",
        {f"{ROLLOUT}.logprobs_mode": "raw_logits"},
        [f"{ROLLOUT}.logprobs_mode=raw_logits", "FP32 head", "processed_logprobs"],
    ),
    "correction that verl computes for nobody": (
        "dapo",
        {f"{CORRECTION}.rollout_is": "token"},
        [f"{CORRECTION}.rollout_is=token has no effect", f"set {CORRECTION}.rollout_is=null"],
    ),
    "rejection that verl computes for nobody": (
        "[sampling_ratio,advantage]",
        {f"{ROLLOUT}.n": 4, f"{CORRECTION}.rollout_rs": "token_k1"},
        [f"{CORRECTION}.rollout_rs=token_k1 has no effect", f"set {CORRECTION}.rollout_rs=null"],
    ),
    "misspelt cap": (
        "recipe",
        {f"{ACTOR}.policy_loss.eps_maxx": 4},
        [f"{ACTOR}.policy_loss.eps_maxx does not exist", "did you mean eps_max?"],
    ),
    "misspelt range": (
        "recipe",
        {f"{ACTOR}.policy_loss.token_mask": [0.5, 5]},
        [f"{ACTOR}.policy_loss.token_mask does not exist", "did you mean token_mask_range?"],
    ),
    "key of the loss like none": (
        "recipe",
        {f"{ACTOR}.policy_loss.zzz": 1},
        [f"{ACTOR}.policy_loss.zzz does not exist", "loss_mode, ", "eps_max", f"~{ACTOR}.policy_loss.zzz"],
    ),
    "baseline after our loss": (
        "[cispo,grpo]",
        {},
        [f"{ACTOR}.policy_loss.eps_max", "loss_mode=vanilla", f"~{ACTOR}.policy_loss.eps_max", "the last one wins"],
    ),
    "cap alone": ("", {f"{ACTOR}.policy_loss.eps_max": 4}, [f"{ACTOR}.policy_loss.eps_max", "loss_mode=scalerl_cispo"]),
    "range alone, null": (
        "",
        {f"{ACTOR}.policy_loss.token_mask_range": None},
        [f"{ACTOR}.policy_loss.token_mask_range", f"~{ACTOR}.policy_loss.token_mask_range"],
    ),
    "weights in FP16": (
        "recipe",
        {f"{ACTOR}.fsdp_config.dtype": "float16"},
        [f"{ACTOR}.fsdp_config.dtype=float16", "bfloat16 or float32"],
    ),
    "forward pass in FP16": (
        "recipe",
        {f"{ACTOR}.fsdp_config.mixed_precision": {"param_dtype": "fp16"}},
        [f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp16", "bfloat16 or float32"],
    ),
}


@pytest.mark.fault("old log-probs recomputed before the update: the ratio is 1 and truncation never acts")
@pytest.mark.fault("another temperature in scoring than in sampling")
@pytest.mark.fault("top-p or top-k: the renormaliser leaks into the ratio")
@pytest.mark.parametrize("fault", REFUSALS)
def test_contradiction_is_refused_with_its_key(fault: str) -> None:
    check_refusal(*REFUSALS[fault])


def test_options_of_our_loss_reach_verl_s_section(only_config_checks: list[str]) -> None:
    config = compose_config(
        "+scalerl=recipe",
        f"+{ACTOR}.policy_loss.token_mask_range=[0.5,5.0]",
        f"+{ACTOR}.policy_loss.sequence_truncation=geometric_mean",
    )
    startup.prepare_run(config)
    section = omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
    assert list(section.token_mask_range) == [0.5, 5.0]
    assert section.get("sequence_truncation") == "geometric_mean"
    assert PolicyLossSettings.from_config(section) == PolicyLossSettings(
        5.0, section.token_mask_range, "geometric_mean"
    )


def test_loss_of_verl_keeps_verl_s_own_section(only_config_checks: list[str]) -> None:
    config = changed("prompt_mean", {})
    before = OmegaConf.to_container(config.actor_rollout_ref, resolve=False)
    startup.prepare_run(config)
    after = OmegaConf.to_container(config.actor_rollout_ref, resolve=False)
    # prompt-mean needs another class of the actor, whatever the loss; every run has another agent loop manager.
    after["actor"]["_target_"] = before["actor"]["_target_"]
    after["rollout"]["agent"] = before["rollout"]["agent"]
    assert after == before
    assert type(omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)) is not ScaleRLPolicyLossConfig


def test_section_refuses_a_negative_cap() -> None:
    with pytest.raises(ValueError, match="eps_max=-1"):
        ScaleRLPolicyLossConfig(loss_mode="scalerl_cispo", eps_max=-1)
