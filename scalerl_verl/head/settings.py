# SPDX-License-Identifier: Apache-2.0
"""The FP32 head in the config: both sides or neither, and only where it takes effect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from scalerl_verl.names import (
    ACTOR,
    CISPO,
    CORRECTION,
    FP32,
    FUSED_KERNELS,
    GENERATOR_DTYPE,
    HEAD_DTYPE,
    HF_OVERRIDES,
    LOSS_AGG_MODE,
    LOSS_MODE,
    MODEL,
    PROMPT_MEAN,
    ROLLOUT,
    SEQUENCE_TRUNCATION,
    SHARED_PASS,
    VLLM,
)
from scalerl_verl.names import HEAD_BACKEND as BACKEND
from scalerl_verl.names import select as _select
from scalerl_verl.names.asking import generator_head_dtype
from scalerl_verl.names.numbers import number

BACKENDS = (FP32, SHARED_PASS)
VERL_BACKENDS = ("torch", "triton", "liger")
_SAME_DTYPE = ("float32", "float", "fp32")
"""What somebody may write for it; vLLM takes some of these, here one spelling is enough."""

_FSDP = ("fsdp", "fsdp2")
_COMMON_FACTOR = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", PROMPT_MEAN)
"""Aggregation modes that multiply every token's loss by one number (prompt weights stand in the advantages)."""
_WHY_NOT = {
    "megatron": "its output layer is sharded over the vocabulary and makes its own log-probs",
    "veomni": "it has fused kernels of its own and never reads impl_backend",
    "torchtitan": "it builds its own model and never reads impl_backend",
    "automodel": "it builds its own model and never reads impl_backend",
    "fsdp_turbo": "it rebuilds the model after verl has patched it",
}


def trainer_backend(config: DictConfig) -> str | None:
    """Return the name of our trainer head in use, or None."""
    backend = _select(config, BACKEND)
    return backend if backend in BACKENDS else None


def find_problems(config: DictConfig) -> Iterator[str]:
    """Every reason why the FP32 head of this config would be one-sided, without effect or wrong."""
    critic = "critic.model.fused_kernel_options.impl_backend"
    if _select(config, critic) in BACKENDS:
        yield f"{critic}={_select(config, critic)}: a value head makes no logits; delete it (~{critic})"
    backend, dtype = _select(config, BACKEND), generator_head_dtype(config)
    if backend is not None and backend not in (*VERL_BACKENDS, *BACKENDS):
        yield f"{BACKEND}={backend} does not exist: use one of {', '.join((*BACKENDS, *VERL_BACKENDS))}"
        return
    if dtype is not None and dtype != GENERATOR_DTYPE and str(dtype).casefold().removeprefix("torch.") in _SAME_DTYPE:
        yield f"{HEAD_DTYPE}={dtype}: write {GENERATOR_DTYPE}"
        return
    backend = trainer_backend(config)
    yield from _both_sides(config, backend, dtype)
    if backend is None:
        return
    for key in OmegaConf.select(config, f"{MODEL}.fused_kernel_options"):
        if key != "impl_backend":
            yield f"{MODEL}.fused_kernel_options.{key} does not exist: the key is impl_backend"
    yield from _engines(config, backend)
    yield from _lora(config, backend)
    if backend == SHARED_PASS:
        yield from _shared_pass(config)


def _both_sides(config: DictConfig, backend: str | None, dtype: Any) -> Iterator[str]:
    if backend is not None and dtype != GENERATOR_DTYPE:
        yield (
            f"{BACKEND}={backend} computes log-probs in FP32 in the trainer only: a mismatch worse than none. Set "
            f"+{HEAD_DTYPE}={GENERATOR_DTYPE} too (+scalerl=fp32_head sets both sides)"
        )
    if backend is None and dtype == GENERATOR_DTYPE:
        given = _select(config, BACKEND, "null")
        yield (
            f"{HEAD_DTYPE}={dtype} computes log-probs in FP32 in the generator only ({BACKEND}={given}): a mismatch "
            f"worse than none. Set {BACKEND}={FP32} too (+scalerl=fp32_head sets both sides), or leave the head "
            f"out here, too (~{_removal(config)})"
        )


def _removal(config: DictConfig) -> str:
    """The key to delete for a generator without the head: an empty section of overrides says nothing."""
    overrides = _select(config, HF_OVERRIDES)
    return HEAD_DTYPE if isinstance(overrides, DictConfig) and len(overrides) > 1 else HF_OVERRIDES


def _engines(config: DictConfig, backend: str) -> Iterator[str]:
    for role in ("actor", "ref"):
        strategy = _select(config, f"actor_rollout_ref.{role}.strategy", "fsdp")
        if strategy not in _FSDP:
            why = _WHY_NOT.get(strategy, "it is not known to read impl_backend")
            yield (
                f"{BACKEND}={backend} with actor_rollout_ref.{role}.strategy={strategy}: {why}, so that the FP32 head "
                "would silently have no effect; set strategy=fsdp2 (or fsdp), or leave the FP32 head out on both sides"
            )
    rollout = _select(config, f"{ROLLOUT}.name", "vllm")
    if rollout != "vllm":
        yield f"{ROLLOUT}.name={rollout} has no FP32 head: set it to vllm, or leave the FP32 head out"
    path = f"{ROLLOUT}.disaggregation.enabled"
    if _select(config, path, False):
        yield (
            f"{path}=True: verl starts servers of its own for it, which do not say whether their heads are FP32; set "
            f"{path}=False, or leave the FP32 head out"
        )
    for key in ("quantization", "qat.enable"):
        path = f"{ROLLOUT}.{key}"
        if _select(config, path):
            yield (
                f"{path}={_select(config, path)}: verl passes its quantisation in vLLM's hf_overrides, which "
                f"{HEAD_DTYPE} replaces; set it to null, or leave the FP32 head out"
            )
    path = f"{VLLM}.quantization"
    if _select(config, path):
        yield (
            f"{path}={_select(config, path)}: a quantised generator's log-probs differ from the trainer's by more than "
            f"{HEAD_DTYPE} corrects; set it to null, or leave the FP32 head out"
        )
    path = f"{ROLLOUT}.full_determinism"
    if _select(config, path, False):
        yield (
            f"{path}=True puts vLLM's batch-invariant kernels in place of its matrix products, for which "
            f"{HEAD_DTYPE}={GENERATOR_DTYPE} is not made, and gives all responses to a prompt one seed; set "
            f"{path}=False, or leave the FP32 head out"
        )


def _lora(config: DictConfig, backend: str) -> Iterator[str]:
    if number(config, f"{MODEL}.lora_rank") <= 0:
        return
    for key in ("target_modules", "target_parameters"):
        targets = _select(config, f"{MODEL}.{key}", ())
        names = [targets] if isinstance(targets, str) else [str(name) for name in targets]
        written = any(layer in name for name in names for layer in ("lm_head", "embed_tokens"))
        if written or (isinstance(targets, str) and _matches_head(targets)):
            yield (
                f"{MODEL}.{key}={names} puts LoRA on the output layer or the embedding, whose adapter would bypass "
                f"{BACKEND}={backend}: leave lm_head and embed_tokens out (all-linear does)"
            )


def _matches_head(pattern: str) -> bool:
    """Whether PEFT would read a single string as a regular expression that the output layer's name matches."""
    try:
        return any(re.fullmatch(pattern, name) for name in ("lm_head", "model.embed_tokens"))
    except re.error:
        return False  # PEFT's to refuse


def _shared_pass(config: DictConfig) -> Iterator[str]:
    to_fp32 = f"or set {BACKEND}={FP32}"
    if not _select(config, FUSED_KERNELS, False):
        yield f"{BACKEND}={SHARED_PASS} is a fused head: set {FUSED_KERNELS}=True, {to_fp32}"
    loss = _select(config, LOSS_MODE, "vanilla")
    if loss != CISPO:
        yield (
            f"{BACKEND}={SHARED_PASS} makes the gradient of loss_mode={CISPO}, not of {loss}: set "
            f"{LOSS_MODE}={CISPO}, {to_fp32}"
        )
    truncation = SEQUENCE_TRUNCATION
    if _select(config, truncation) is not None:
        yield f"{BACKEND}={SHARED_PASS} needs a ratio per token: set {truncation}=null, {to_fp32}"
    mode = _select(config, LOSS_AGG_MODE, "token-mean")
    if mode not in _COMMON_FACTOR:
        yield (
            f"{LOSS_AGG_MODE}={mode} divides tokens by numbers of their own, {BACKEND}={SHARED_PASS} needs one "
            f"factor for all: use one of {', '.join(_COMMON_FACTOR)}, {to_fp32}"
        )
    for path, off in (
        (f"{ACTOR}.entropy_coeff", 0),
        (f"{ACTOR}.use_kl_loss", False),
        (f"{CORRECTION}.rollout_is", None),
        ("distillation.enabled", False),
    ):
        value = _select(config, path, off)
        if value != off:
            shown = "null" if off is None else off
            yield (
                f"{path}={value} adds to the gradient what {BACKEND}={SHARED_PASS} cannot know: set it to {shown}, "
                f"{to_fp32}"
            )
