# SPDX-License-Identifier: Apache-2.0
"""How long generation and training of a batch take, and the split of GPUs at which they take the same.

This is arithmetic from shapes: floating-point operations over a share of the GPU's peak in training; in generation,
each step reads the weights and the cache and multiplies every sequence once. Evaluate it as a ratio: both sides scale
with their number of GPUs. The assumptions are fields and are printed with every plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.shapes import ModelShape


@dataclass(frozen=True)
class Device:
    """A GPU: dense bf16 operations a second and bytes a second of its memory, from its vendor's data sheet."""

    flops: float
    bandwidth: float


DEVICES = {
    "a100": Device(312e12, 2.039e12),
    "h100": Device(989e12, 3.35e12),
    "h200": Device(989e12, 4.8e12),
    "b200": Device(2.25e15, 8.0e12),
    "gb200": Device(2.5e15, 8.0e12),
}


@dataclass(frozen=True)
class Assumptions:
    """What shapes do not say.

    Args:
        mean_prompt: tokens of a prompt.
        mean_response: tokens of a response.
        training_efficiency: share of the peak that an update reaches.
        decode_efficiency: share of the ideal speed of a decoding step, in which reading and computing do not overlap;
            .65 gives what `benchmarks/results/vllm_head.jsonl` records of an engine.
        network_gbs: GB a second of one GPU's network card, one way; 40 is four fifths of 400 Gbit/s.
        rejected_frac: share of the generated groups that dynamic sampling rejects; they cost generation alone.
    """

    mean_prompt: float
    mean_response: float
    training_efficiency: float = 0.35
    decode_efficiency: float = 0.65
    network_gbs: float = 40.0
    rejected_frac: float = 0.0

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value}: give a number above 0{' and at most 1' if name.endswith('efficiency') else ''}"
            for name, value in vars(self).items()
            if name != "rejected_frac" and (not 0 < value < math.inf or (name.endswith("efficiency") and value > 1))
        ]
        if not 0 <= self.rejected_frac < 1:
            problems.append(f"rejected_frac={self.rejected_frac}: give a number from 0 to below 1")
        if problems:
            raise ScaleRLConfigError(problems)


def attention_flops(shape: ModelShape, tokens: float) -> float:
    """Forward operations of causal attention over one sequence: scores and their product with the values."""
    return 2 * shape.num_layers * shape.q_size * tokens * tokens


def training_flops(
    shape: ModelShape, sequences: float, mean: Assumptions, num_forwards: int, adapter_params: int = 0
) -> float:
    """Operations of one update.

    Args:
        shape: of the model.
        sequences: that it trains on.
        mean: lengths.
        num_forwards: forward passes: 1, one more where layers are recomputed, and one where old log-probs are.
        adapter_params: numbers that train beside a model that is frozen; 0: the model trains.
    """
    tokens = mean.mean_prompt + mean.mean_response
    forward = 2 * (shape.active_params + adapter_params) * tokens + attention_flops(shape, tokens)
    # Backward costs two forward passes, one of them for the weights' gradients, which frozen matrices do not have.
    frozen = 2 * shape.active_params * tokens if adapter_params else 0.0
    return sequences * (forward * (num_forwards + 2) - frozen)


def touched_weights(shape: ModelShape, sequences: float) -> float:
    """Weights that a decoding step of so many sequences reads: experts are drawn at random, evenly."""
    experts = shape.expert_params * shape.num_mixture_layers
    embedding = shape.vocab * shape.hidden  # a lookup, unless it is the output layer, too
    dense = shape.num_params - experts - (0 if shape.tied else embedding)
    if not experts:
        return dense
    missed = (1 - shape.experts_per_token / shape.num_experts) ** sequences
    return dense + experts * (1 - missed)


def decode_step_s(
    shape: ModelShape, device: Device, sequences: float, num_gpus: int, mean: Assumptions, weight_bytes: int = 2
) -> float:
    """Seconds of one decoding step of an engine.

    Args:
        shape: of the model.
        device: the GPU.
        sequences: that the step extends by a token.
        num_gpus: of the engine.
        mean: lengths; a sequence in flight is half way through its response.
        weight_bytes: of a weight and of a number in the cache.
    """
    context = mean.mean_prompt + mean.mean_response / 2
    cache = 2 * shape.num_layers * shape.kv_size * context * sequences
    read_s = weight_bytes * (touched_weights(shape, sequences) + cache) / device.bandwidth
    flops = sequences * (2 * shape.active_params + 4 * shape.num_layers * shape.q_size * context)
    return (read_s + flops / device.flops) / num_gpus / mean.decode_efficiency


@dataclass(frozen=True)
class Rates:
    """Seconds that one GPU of each side takes for one optimizer step's data, and the concurrency behind them."""

    training_gpu_s: float
    generation_gpu_s: float
    sequences_per_engine: float

    @property
    def trainer_share(self) -> float:
        """Share of all GPUs that should train so that neither side waits."""
        return self.training_gpu_s / (self.training_gpu_s + self.generation_gpu_s)

    def step_s(self, trainers: int, generators: int) -> tuple[float, float]:
        """Seconds of a step's training and generation on so many GPUs."""
        return self.training_gpu_s / trainers, self.generation_gpu_s / generators


def find_rates(
    shape: ModelShape,
    device: Device,
    mean: Assumptions,
    sequences: int,
    num_forwards: int,
    sequences_per_engine: float,
    gpus_per_engine: int,
    adapter_params: int = 0,
) -> Rates:
    """Cost of one optimizer step's data on each side, in seconds of one GPU.

    Args:
        shape: of the model.
        device: the GPU.
        mean: lengths and efficiencies.
        sequences: of one optimizer step.
        num_forwards: see `training_flops`.
        sequences_per_engine: in flight on an engine.
        gpus_per_engine: GPUs of an engine.
        adapter_params: see `training_flops`.
    """
    flops = training_flops(shape, sequences, mean, num_forwards, adapter_params)
    step_s = decode_step_s(shape, device, sequences_per_engine, gpus_per_engine, mean)
    tokens_per_gpu_s = sequences_per_engine / step_s / gpus_per_engine
    prefill = sequences * mean.mean_prompt * 2 * shape.active_params / (device.flops * mean.training_efficiency)
    return Rates(
        training_gpu_s=flops / (device.flops * mean.training_efficiency),
        generation_gpu_s=(sequences * mean.mean_response / tokens_per_gpu_s + prefill) / (1 - mean.rejected_frac),
        sequences_per_engine=sequences_per_engine,
    )
