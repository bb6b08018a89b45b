# SPDX-License-Identifier: Apache-2.0
"""The FP32 head in the config: both sides or neither, and only where it takes effect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from scalerl_verl import names
from scalerl_verl.names import ACTOR, CISPO, FP32, GENERATOR_DTYPE, HEAD_DTYPE, MODEL, ROLLOUT, SHARED_PASS, select
from scalerl_verl.names import HEAD_BACKEND as BACKEND
from scalerl_verl.names.asking import generator_head_dtype, loss_agg_mode, loss_mode
from scalerl_verl.names.numbers import number
from scalerl_verl.names.rules import one_of, or_null, then, under

BACKENDS = (FP32, SHARED_PASS)
VERL_BACKENDS = ("torch", "triton", "liger")
_SAME_DTYPE = ("float32", "float", "fp32")
"""What somebody may write for it; vLLM takes some of these, here one spelling is enough."""

LEAVE_OUT = f"leave the FP32 head out ({names.FUSED_KERNELS}=False {BACKEND}=torch ~{names.HF_OVERRIDES})"
_STRATEGIES = ("fsdp", "fsdp2", names.MEGATRON)
_ROLES = ("actor", "ref")
_COMMON_FACTOR = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", names.PROMPT_MEAN)
"""Aggregation modes that multiply every token's loss by one number (prompt weights stand in the advantages)."""
_IN_OVERRIDES = f"verl passes its quantisation in vLLM's hf_overrides, which {HEAD_DTYPE} replaces"
_QUANTISED = {
    f"{ROLLOUT}.quantization": _IN_OVERRIDES,
    f"{ROLLOUT}.qat.enable": _IN_OVERRIDES,
    f"{names.VLLM}.quantization": "a quantised generator's log-probs differ from the trainer's by more than "
    f"{HEAD_DTYPE} corrects",
}
_OTHER_GRADIENTS = {
    f"{ACTOR}.entropy_coeff": 0,
    f"{ACTOR}.use_kl_loss": False,
    f"{names.CORRECTION}.rollout_is": None,
    "distillation.enabled": False,
}
_MEGATRON_KEYS = {
    "use_megatron_fsdp": "it shards the output layer's weight a second time, with which the head is not made",
    "override_transformer_config.defer_embedding_wgrad_compute": "the head makes the gradient of the output layer's "
    "weight itself, and Megatron would wait for it to be deferred",
}
"""Keys of a Megatron section -> why the head cannot go with them."""
_NEEDS_LOGITS = {
    f"{ACTOR}.calculate_sum_pi_squared": (True,),
    "distillation.distillation_loss.loss_mode": ("forward_kl_topk",),
}
"""Key -> values with which verl's engines work on logits."""
_WHY_NOT = {
    "veomni": "it has fused kernels of its own and never reads impl_backend",
    "torchtitan": "it builds its own model and never reads impl_backend",
    "automodel": "it builds its own model and never reads impl_backend",
    "fsdp_turbo": "it rebuilds the model after verl has patched it",
}


def trainer_backend(config: DictConfig) -> str | None:
    """Return the name of our trainer head in use, or None."""
    backend = select(config, BACKEND)
    return backend if backend in BACKENDS else None


def model_backend(model_config: Any) -> str | None:
    """Return the name of our trainer head that verl's config of a model asks for, or None."""
    backend = (model_config.fused_kernel_options or {}).get("impl_backend")
    return backend if backend in BACKENDS else None


def _critic(config: DictConfig) -> Iterator[str]:
    critic = "critic.model.fused_kernel_options.impl_backend"
    if select(config, critic) in BACKENDS:
        yield f"{critic}={select(config, critic)}: a value head makes no logits; delete it (~{critic})"


def _spelling(config: DictConfig) -> Iterator[str]:
    backend, dtype = select(config, BACKEND), generator_head_dtype(config)
    if backend not in (None, *BACKENDS, *VERL_BACKENDS):
        yield f"{BACKEND}={backend} does not exist: {one_of((*BACKENDS, *VERL_BACKENDS))}"
    elif dtype != GENERATOR_DTYPE and str(dtype).casefold().removeprefix("torch.") in _SAME_DTYPE:
        yield f"{HEAD_DTYPE}={dtype}: write {GENERATOR_DTYPE}"


def _both_sides(config: DictConfig) -> Iterator[str]:
    backend, dtype = trainer_backend(config), generator_head_dtype(config)
    if backend is not None and dtype != GENERATOR_DTYPE:
        yield (
            f"{BACKEND}={backend} computes log-probs in FP32 in the trainer only: a mismatch worse than none. Set "
            f"+{HEAD_DTYPE}={GENERATOR_DTYPE} too (+scalerl=fp32_head sets both sides)"
        )
    if backend is None and dtype == GENERATOR_DTYPE:
        overrides = select(config, names.HF_OVERRIDES)
        # An empty section of overrides says nothing.
        removed = HEAD_DTYPE if isinstance(overrides, DictConfig) and len(overrides) > 1 else names.HF_OVERRIDES
        yield (
            f"{HEAD_DTYPE}={dtype} computes log-probs in FP32 in the generator only "
            f"({BACKEND}={select(config, BACKEND, 'null')}): a mismatch worse than none. Set {BACKEND}={FP32} too "
            f"(+scalerl=fp32_head sets both sides), or leave the head out here, too (~{removed})"
        )


def _engines(config: DictConfig) -> Iterator[str]:
    for key in OmegaConf.select(config, f"{MODEL}.fused_kernel_options"):
        if key != "impl_backend":
            yield f"{MODEL}.fused_kernel_options.{key} does not exist: the key is impl_backend"
    given = _strategies(config)
    for strategy in sorted(set(given.values()) - set(_STRATEGIES)):
        why = _WHY_NOT.get(strategy, "it is not known to read impl_backend")
        where = " and ".join(f"actor_rollout_ref.{role}.strategy={strategy}" for role in _roles(config, strategy))
        yield (
            f"{BACKEND}={trainer_backend(config)} with {where}: the FP32 head would have no effect, because "
            f"{why}; set strategy=fsdp2 (or fsdp, or megatron), or {LEAVE_OUT}"
        )
    rollout = select(config, f"{ROLLOUT}.name", "vllm")
    if rollout != "vllm":
        yield f"{ROLLOUT}.name={rollout} has no FP32 head: set it to vllm, or {LEAVE_OUT}"
    path = f"{ROLLOUT}.disaggregation.enabled"
    if select(config, path, False):
        yield (
            f"{path}=True: verl starts servers of its own for it, which do not say whether their heads are FP32; set "
            f"{path}=False, or {LEAVE_OUT}"
        )
    for path, why in _QUANTISED.items():
        if value := select(config, path):
            yield f"{path}={value}: {why}; set it to null, or {LEAVE_OUT}"
    path = f"{ROLLOUT}.full_determinism"
    if select(config, path, False):
        yield (
            f"{path}=True replaces vLLM's matrix products by batch-invariant kernels, which "
            f"{HEAD_DTYPE}={GENERATOR_DTYPE} does not work with. It also gives all responses to a prompt one seed; "
            f"set {path}=False, or {LEAVE_OUT}"
        )


def _strategies(config: DictConfig) -> dict[str, str]:
    """Role -> verl's name of its engine."""
    return {role: str(select(config, f"actor_rollout_ref.{role}.strategy", "fsdp")) for role in _ROLES}


def _roles(config: DictConfig, strategy: str) -> list[str]:
    return [role for role, given in _strategies(config).items() if given == strategy]


def _on_megatron(config: DictConfig) -> bool:
    return bool(_roles(config, names.MEGATRON))


def _megatron(config: DictConfig) -> Iterator[str]:
    roles, backend = _roles(config, names.MEGATRON), trainer_backend(config)
    if backend == SHARED_PASS:
        yield (
            f"{BACKEND}={SHARED_PASS} with actor_rollout_ref.{roles[0]}.strategy={names.MEGATRON}: ranks that "
            f"share a vocabulary know a log-prob too late to share the pass; set {BACKEND}={FP32}"
        )
    for role in roles:
        for key, why in _MEGATRON_KEYS.items():
            path = f"actor_rollout_ref.{role}.megatron.{key}"
            if select(config, path, False):
                yield f"{path}=True: {why}; set it to False, or {LEAVE_OUT}"
    path = f"{MODEL}.mtp.enable"
    if select(config, path, False):
        yield (
            f"{path}=True: multi-token prediction calls Megatron's output layer for logits, which {BACKEND}={backend} "
            f"does not make there; set it to False, or {LEAVE_OUT}"
        )


def _logits(config: DictConfig) -> Iterator[str]:
    for path, values in _NEEDS_LOGITS.items() if select(config, names.FUSED_KERNELS, False) else ():
        is_off = path.startswith("distillation.") and not select(config, "distillation.enabled", False)
        if (value := select(config, path)) in values and not is_off:
            yield (
                f"{path}={value} needs logits, which {BACKEND}={trainer_backend(config)} does not make with "
                f"{names.FUSED_KERNELS}=True: set {names.FUSED_KERNELS}=False"
            )


def _lora(config: DictConfig) -> Iterator[str]:
    for key in ("target_modules", "target_parameters") if number(config, f"{MODEL}.lora_rank") > 0 else ():
        targets = select(config, f"{MODEL}.{key}", ())
        given = [targets] if isinstance(targets, str) else [str(name) for name in targets]
        written = any(layer in name for name in given for layer in ("lm_head", "embed_tokens"))
        if written or (isinstance(targets, str) and _matches_head(targets)):
            yield (
                f"{MODEL}.{key}={given} puts LoRA on the output layer or the embedding, whose adapter would bypass "
                f"{BACKEND}={trainer_backend(config)}: leave lm_head and embed_tokens out (all-linear does)"
            )


def _matches_head(pattern: str) -> bool:
    """Whether PEFT would read a single string as a regular expression that the output layer's name matches."""
    try:
        return any(re.fullmatch(pattern, name) for name in ("lm_head", "model.embed_tokens"))
    except re.error:
        return False  # PEFT's to refuse


def _shares_pass(config: DictConfig) -> bool:
    return trainer_backend(config) == SHARED_PASS


def _shared_pass(config: DictConfig) -> Iterator[str]:
    to_fp32 = f"or set {BACKEND}={FP32}"
    if not select(config, names.FUSED_KERNELS, False):
        yield f"{BACKEND}={SHARED_PASS} is a fused head: set {names.FUSED_KERNELS}=True, {to_fp32}"
    if (loss := loss_mode(config)) != CISPO:
        yield (
            f"{BACKEND}={SHARED_PASS} makes the gradient of loss_mode={CISPO}, not of {loss}: set "
            f"{names.LOSS_MODE}={CISPO}, {to_fp32}"
        )
    if select(config, names.SEQUENCE_TRUNCATION) is not None:
        yield f"{BACKEND}={SHARED_PASS} needs a ratio per token: set {names.SEQUENCE_TRUNCATION}=null, {to_fp32}"
    if (mode := loss_agg_mode(config)) not in _COMMON_FACTOR:
        yield (
            f"{names.LOSS_AGG_MODE}={mode} divides tokens by numbers of their own, {BACKEND}={SHARED_PASS} needs one "
            f"factor for all: {one_of(_COMMON_FACTOR)}, {to_fp32}"
        )
    for path, off in _OTHER_GRADIENTS.items():
        if (value := select(config, path, off)) != off:
            yield (
                f"{path}={value} adds to the gradient what {BACKEND}={SHARED_PASS} cannot know: set it to "
                f"{or_null(off)}, {to_fp32}"
            )


RULES = (
    _critic,
    then(
        _spelling,
        _both_sides,
        under(trainer_backend, _engines, _lora, _logits, under(_on_megatron, _megatron)),
        under(_shares_pass, _shared_pass),
    ),
)
"""Every reason why the FP32 head of a config would be one-sided, without effect or wrong."""
