# SPDX-License-Identifier: Apache-2.0
"""What a pipeline run cannot do with a vLLM engine, read from what vLLM made of all settings.

The start-up checks read the run's config; but vLLM also takes settings from the model's own files, derives some from
others, and knows several spellings of most.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.names import PIPELINE_RL, ROLLOUT, TRAINER_MODE, VLLM


def require_updatable(vllm_config: Any, num_ranks: int) -> None:
    """Refuse an engine whose requests could not be kept over a weight update.

    Args:
        vllm_config: vLLM's VllmConfig of the running engine.
        num_ranks: tensor parallelism that the run asked for; each rank has a worker that stages its weights.

    Raises:
        ScaleRLConfigError: says what it has, why that does not work, and what to change.
    """
    if problems := list(_find_problems(vllm_config, num_ranks)):
        raise ScaleRLConfigError([f"the engine of {TRAINER_MODE}={PIPELINE_RL} {text}" for text in problems])


def _find_problems(vllm_config: Any, num_ranks: int) -> Iterator[str]:
    parallel = vllm_config.parallel_config
    num_devices = parallel.world_size * parallel.data_parallel_size
    if not num_devices == parallel.tensor_parallel_size == num_ranks:
        yield (
            f"spans {num_devices} devices (tensor {parallel.tensor_parallel_size}, pipeline "
            f"{parallel.pipeline_parallel_size}, data {parallel.data_parallel_size}), of which verl counts "
            f"{num_ranks}: set {ROLLOUT}.tensor_model_parallel_size only, and take "
            f"what asks for more devices out of {VLLM}"
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
            yield f"has {what}: unset {VLLM}.{remedy}"
