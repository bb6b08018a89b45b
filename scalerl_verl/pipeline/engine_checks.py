# SPDX-License-Identifier: Apache-2.0
"""What a pipeline run cannot do with a vLLM engine, read from what vLLM made of all settings.

The start-up checks read the run's config; but vLLM also takes settings from the model's own files, derives some from
others, and knows several spellings of most.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scalerl_verl.errors import ScaleRLConfigError

_KWARGS = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def require_updatable(vllm_config: Any) -> None:
    """Refuse an engine whose requests could not be kept over a weight update.

    Args:
        vllm_config: vLLM's VllmConfig of the running engine.

    Raises:
        ScaleRLConfigError: says what it has, why that does not work, and what to change.
    """
    if problems := list(_find_problems(vllm_config)):
        raise ScaleRLConfigError([f"the engine of trainer.v1.trainer_mode=pipeline_rl {text}" for text in problems])


def _find_problems(vllm_config: Any) -> Iterator[str]:
    parallel = vllm_config.parallel_config
    if (num_devices := parallel.world_size * parallel.data_parallel_size) != 1:
        yield (
            f"spans {num_devices} devices (tensor {parallel.tensor_parallel_size}, pipeline "
            f"{parallel.pipeline_parallel_size}, data {parallel.data_parallel_size}): updates are verified for one "
            f"device; take what asks for more out of {_KWARGS} and add replicas by rollout.n_gpus_per_node"
        )
    parts = {
        "lora_config": ("adapters, which are not swapped together with the model", "enable_lora"),
        "speculative_config": ("a draft model, which is not updated together with the model", "speculative_config"),
        "quant_config": (
            "quantised weights, which are quantised again on loading, as no test covers",
            "quantization, and take a model without a quantization_config of its own",
        ),
        "kv_transfer_config": (
            "a store of KV outside the engine, which does not know weight versions",
            "kv_transfer_config and kv_offloading_size",
        ),
        "ec_transfer_config": ("a store of encoder outputs, which does not know weight versions", "ec_transfer_config"),
    }
    for name, (what, remedy) in parts.items():
        if getattr(vllm_config, name, None) is not None:
            yield f"has {what}: unset {_KWARGS}.{remedy}"
