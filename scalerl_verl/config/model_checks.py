# SPDX-License-Identifier: Apache-2.0
"""Kinds of model that a run cannot have, by the ``config.json``: a worker would say so minutes later, or nobody."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from scalerl_verl.engine_context import read_hf_config
from scalerl_verl.head import settings as head_settings
from scalerl_verl.names import HEAD_BACKEND, MODEL, PIPELINE_RL, TRAINER_MODE, select
from scalerl_verl.names.asking import trainer_mode
from scalerl_verl.upstream.activation import PLATFORM_ENV, is_cpu_platform

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def find_model_problems(config: DictConfig) -> Iterator[str]:
    """Pieces that a model with a vision or audio part cannot have, and experts on a CPU."""
    parts, path = read_hf_config(config) or {}, f"{MODEL}.path={select(config, f'{MODEL}.path')}"
    if is_cpu_platform() and any(parts.get(key) for key in _EXPERTS):
        yield (
            f"{path} with {PLATFORM_ENV}=cpu: vLLM packs the weights of "
            "experts for its CPU kernels, and a weight update would be written over them in another order; take a "
            "dense model, or a GPU"
        )
    has_vision, has_audio = (parts.get(key) is not None for key in ("vision_config", "audio_config"))
    backend = head_settings.trainer_backend(config)
    if has_vision and backend is not None:
        yield (
            f"{path} with {HEAD_BACKEND}={backend}: the model has a vision part, and verl gives such models forwards "
            f"of its own, with which the FP32 head is not tested; {head_settings.LEAVE_OUT}"
        )
    if (has_vision or has_audio) and trainer_mode(config) == PIPELINE_RL:
        yield (
            f"{path} with {TRAINER_MODE}={PIPELINE_RL}: the model reads images or sounds, and vLLM's encoder cache "
            f"does not know weight versions; take a model of text alone, or another {TRAINER_MODE}"
        )
