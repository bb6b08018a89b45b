# SPDX-License-Identifier: Apache-2.0
"""The start-up check of the FP32 head: one side alone, and what it cannot serve."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl_verl.config.checks import find_problems
from scalerl_verl.names.asking import asked_names
from tests.unit.composed import (
    ACTOR,
    HEAD,
    HEAD_DTYPE,
    MODEL,
    ROLLOUT,
    Refusal,
    changed,
    check_refusal,
    compose_config,
    with_overrides,
)

pytestmark = pytest.mark.usefixtures("clean_environment")

REFUSALS: dict[str, Refusal] = {
    "FP32 head in the trainer only": (
        "",
        {HEAD: "fp32", f"{MODEL}.use_fused_kernels": True},
        [f"{HEAD}=fp32", "in the trainer only", f"+{HEAD_DTYPE}=float32"],
    ),
    "FP32 head in the trainer only, without fusion": ("", {HEAD: "fp32"}, [f"{HEAD}=fp32", "in the trainer only"]),
    "FP32 head in the generator only": (
        "",
        {HEAD_DTYPE: "float32"},
        [f"{HEAD_DTYPE}=float32", f"{HEAD}=torch", "in the generator only", f"Set {HEAD}=fp32"],
    ),
    "FP32 head in the generator only, as JSON": (
        "",
        {f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides": '{"head_dtype": "float32"}'},
        ["in the generator only"],
    ),
    "other dtype in the generator": ("fp32_head", {HEAD_DTYPE: "bfloat16"}, ["in the trainer only"]),
    "misspelt FP32 head": ("", {HEAD: "FP32"}, [f"{HEAD}=FP32 does not exist", "fp32, fp32_shared_pass, torch"]),
    "FP32 head by another name": ("", {HEAD: "float32"}, [f"{HEAD}=float32 does not exist"]),
    "misspelt dtype": ("", {HEAD_DTYPE: "FP32"}, [f"{HEAD_DTYPE}=FP32", "write float32"]),
    "dtype that vLLM would take": ("", {HEAD_DTYPE: "float"}, [f"{HEAD_DTYPE}=float", "write float32"]),
    "unknown option of the head": (
        "fp32_head",
        {f"{MODEL}.fused_kernel_options.chunk_rows": 5},
        ["fused_kernel_options.chunk_rows does not exist", "impl_backend"],
    ),
    "FP32 head in a critic": (
        "fp32_head",
        {"critic.model.fused_kernel_options.impl_backend": "fp32"},
        ["critic.model.fused_kernel_options.impl_backend=fp32", "value head"],
    ),
    "FP32 head in another engine of the reference": (
        "fp32_head",
        {"actor_rollout_ref.ref.strategy": "veomni"},
        ["actor_rollout_ref.ref.strategy=veomni", "no effect", "fsdp2"],
    ),
    "FP32 head with SGLang": ("fp32_head", {f"{ROLLOUT}.name": "sglang"}, [f"{ROLLOUT}.name=sglang", "vllm"]),
    "FP32 head with prefill apart": (
        "fp32_head",
        {f"{ROLLOUT}.disaggregation.enabled": True},
        [f"{ROLLOUT}.disaggregation.enabled=True", f"set {ROLLOUT}.disaggregation.enabled=False"],
    ),
    "FP32 head with a quantised generator": (
        "fp32_head",
        {f"{ROLLOUT}.quantization": "fp8"},
        [f"{ROLLOUT}.quantization=fp8", HEAD_DTYPE],
    ),
    "LoRA on the head": (
        "fp32_head",
        {f"{MODEL}.lora_rank": 8, f"{MODEL}.target_modules": ["q_proj", "lm_head"]},
        [f"{MODEL}.target_modules=['q_proj', 'lm_head']", "all-linear"],
    ),
    "shared pass with Megatron": (
        "recipe",
        {f"{ACTOR}.strategy": "megatron", HEAD: "fp32_shared_pass"},
        [f"{ACTOR}.strategy=megatron", f"set {HEAD}=fp32"],
    ),
    "FP32 head with Megatron-FSDP": (
        "fp32_head",
        {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.use_megatron_fsdp": True},
        [f"{ACTOR}.megatron.use_megatron_fsdp=True", "set it to False"],
    ),
    "FP32 head with a deferred gradient in the reference": (
        "fp32_head",
        {
            f"{ACTOR}.strategy": "megatron",
            "actor_rollout_ref.ref.megatron.override_transformer_config.defer_embedding_wgrad_compute": True,
        },
        ["actor_rollout_ref.ref.megatron.override_transformer_config.defer_embedding_wgrad_compute=True", "to False"],
    ),
    "FP32 head with multi-token prediction": (
        "fp32_head",
        {f"{ACTOR}.strategy": "megatron", f"{MODEL}.mtp.enable": True},
        [f"{MODEL}.mtp.enable=True", "set it to False"],
    ),
    "fused FP32 head with what needs Megatron's logits": (
        "fp32_head",
        {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.calculate_sum_pi_squared": True},
        [f"{ACTOR}.calculate_sum_pi_squared=True", f"set {MODEL}.use_fused_kernels=False"],
    ),
    "fused FP32 head with what needs FSDP's logits": (
        "fp32_head",
        {f"{ACTOR}.calculate_sum_pi_squared": True},
        [f"{ACTOR}.calculate_sum_pi_squared=True", f"set {MODEL}.use_fused_kernels=False"],
    ),
    "fused FP32 head with distillation from logits": (
        "fp32_head",
        {
            f"{ACTOR}.strategy": "megatron",
            "distillation.enabled": True,
            "distillation.distillation_loss.loss_mode": "forward_kl_topk",
        },
        ["distillation.distillation_loss.loss_mode=forward_kl_topk", f"set {MODEL}.use_fused_kernels=False"],
    ),
    "shared pass without fusion": (
        "recipe",
        {HEAD: "fp32_shared_pass", f"{MODEL}.use_fused_kernels": False},
        [f"set {MODEL}.use_fused_kernels=True", f"or set {HEAD}=fp32"],
    ),
    "shared pass with another loss": (
        "fp32_head",
        {HEAD: "fp32_shared_pass"},
        ["not of vanilla", f"set {ACTOR}.policy_loss.loss_mode=scalerl_cispo"],
    ),
    "shared pass with a ratio per sequence": (
        "recipe",
        {HEAD: "fp32_shared_pass", f"{ACTOR}.policy_loss.sequence_truncation": "product"},
        [f"set {ACTOR}.policy_loss.sequence_truncation=null"],
    ),
    "shared pass with a mean per sequence": (
        "recipe",
        {HEAD: "fp32_shared_pass", f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
        [f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", "prompt-mean"],
    ),
    "shared pass with an entropy bonus": (
        "recipe",
        {
            HEAD: "fp32_shared_pass",
            f"{ACTOR}.loss_agg_mode": "token-mean",
            f"{ACTOR}.entropy_coeff": 0.1,
            "algorithm.scalerl.zero_variance": "keep",
        },
        [f"{ACTOR}.entropy_coeff=0.1", "set it to 0", f"or set {HEAD}=fp32"],
    ),
    "FP32 head with verl's full determinism": (
        "fp32_head",
        {f"{ROLLOUT}.full_determinism": True},
        [f"{ROLLOUT}.full_determinism=True", f"set {ROLLOUT}.full_determinism=False"],
    ),
    "FP32 head with a generator quantised by the engine's own arguments": (
        "fp32_head",
        {f"{ROLLOUT}.engine_kwargs.vllm.quantization": "fp8"},
        [f"{ROLLOUT}.engine_kwargs.vllm.quantization=fp8", "set it to null"],
    ),
    "LoRA on all that has a name": (
        "fp32_head",
        {f"{MODEL}.lora_rank": 8, f"{MODEL}.target_modules": ".*"},
        [f"{MODEL}.target_modules=['.*']", "all-linear"],
    ),
    "FP32 head left out of the trainer only": (
        "recipe",
        {HEAD: "torch"},
        ["in the generator only", f"(~{ROLLOUT}.engine_kwargs.vllm.hf_overrides)"],
    ),
    "FP32 head beside another override": (
        "recipe",
        {HEAD: "torch", f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides.rope_theta": 1},
        ["in the generator only", f"(~{HEAD_DTYPE})"],
    ),
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_contradiction_is_refused_with_its_key(fault: str) -> None:
    check_refusal(*REFUSALS[fault])


@pytest.mark.parametrize("strategy", ["veomni", "torchtitan", "automodel"])
def test_engine_that_never_reads_the_backend_is_refused(strategy: str) -> None:
    (problem,) = find_problems(changed("fp32_head", {f"{ACTOR}.strategy": strategy}))
    # The reference takes the actor's strategy.
    assert f"{ACTOR}.strategy={strategy} and actor_rollout_ref.ref.strategy={strategy}" in problem
    assert "no effect" in problem and "set strategy=fsdp2" in problem


@pytest.mark.parametrize(
    "changes",
    [
        {f"{MODEL}.lora_rank": 8},
        {f"{MODEL}.lora_rank": 8, f"{MODEL}.target_modules": ["q_proj", "gate_proj"]},
        {f"{MODEL}.target_modules": ["lm_head"]},
        {f"{MODEL}.use_fused_kernels": False},
        {f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides": '{"head_dtype": "float32"}'},
        {HEAD: "fp32_shared_pass"},
        {HEAD: "fp32_shared_pass", f"{ACTOR}.policy_loss.token_mask_range": [0.5, 2.0]},
        {HEAD: "fp32_shared_pass", f"{ACTOR}.calculate_entropy": True},
    ],
)
def test_fp32_head_that_works_is_let_through(changes: dict[str, Any]) -> None:
    assert find_problems(changed("recipe", changes)) == []


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [f"{MODEL}.use_fused_kernels=False", f"{ACTOR}.calculate_sum_pi_squared=True"],
        [f"{ACTOR}.megatron.tensor_model_parallel_size=2", f"{ACTOR}.megatron.pipeline_model_parallel_size=2"],
        ["distillation.distillation_loss.loss_mode=forward_kl_topk"],
    ],
)
def test_fp32_head_of_megatron_is_let_through(changes: list[str]) -> None:
    assert find_problems(with_overrides(compose_config("model_engine=megatron", "+scalerl=fp32_head"), changes)) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "model", "half"])
def test_a_head_dtype_of_vllm_s_own_is_none_of_ours(dtype: str) -> None:
    assert asked_names(changed("", {HEAD_DTYPE: dtype})) == {}
