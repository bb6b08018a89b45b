# SPDX-License-Identifier: Apache-2.0
"""Memory of one GPU that generates: vLLM's weights, its KV cache, and what weight updates need beside it.

Bytes throughout. The size of a KV block is compared in tests with vLLM's own specification of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scalerl_verl.names import DEVICE, HOST
from scalerl_verl.pipeline.transfer import NO_TRANSFER, Transfer, largest_sent, staged_bytes
from scalerl_verl.shapes import ModelShape

FP32 = 4


@dataclass(frozen=True)
class GeneratorSetup:
    """How vLLM serves a model.

    Args:
        gpu_bytes: memory of a GPU.
        utilization: share of it that vLLM takes (``rollout.gpu_memory_utilization``).
        tensor_parallel: GPUs of one engine.
        expert_parallel: GPUs over which experts are spread; 1: as all other weights.
        weight_bytes: of a weight.
        kv_bytes: of a number in the cache.
        block_tokens: of a block of the cache.
        max_model_len: tokens of the longest sequence.
        max_num_seqs: sequences of one step at most.
        max_num_batched_tokens: tokens of one step at most.
        transfer: how new weights arrive.
        reserve_bytes: CUDA context, graphs and workspaces.
    """

    gpu_bytes: float
    utilization: float
    tensor_parallel: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    expert_parallel: int = 1
    weight_bytes: int = 2
    kv_bytes: int = 2
    block_tokens: int = 16
    transfer: Transfer = NO_TRANSFER
    reserve_bytes: float = 0.0


@dataclass(frozen=True)
class GeneratorMemory:
    """Bytes on one GPU that generates, and how many sequences of the greatest length its engine holds.

    ``staged`` and ``buffers`` lie beside vLLM's share: the whole model on every GPU of an engine, as each receives it
    whole. ``host`` is the copy in page-locked memory of a node, for all its engines.
    """

    budget: float
    weights: float
    profile: float
    reserve: float
    staged: float
    buffers: float
    host: float
    block: int
    num_blocks: int
    block_tokens: int
    blocks_per_sequence: int

    @property
    def cache(self) -> float:
        """The KV cache."""
        return self.num_blocks * self.block

    @property
    def cache_tokens(self) -> int:
        """Tokens that an engine's cache holds."""
        return self.num_blocks * self.block_tokens

    @property
    def num_longest(self) -> float:
        """Sequences of the greatest length that fit at once."""
        return self.num_blocks / self.blocks_per_sequence

    @property
    def outside(self) -> float:
        """What a weight update needs beside vLLM's share."""
        return self.staged + self.buffers

    @property
    def least(self) -> float:
        """The smallest share that holds one sequence of the greatest length."""
        return self.weights + self.profile + self.reserve + self.blocks_per_sequence * self.block

    @property
    def peak(self) -> float:
        """All that a weight update finds on the GPU."""
        return self.budget + self.outside


def kv_block_bytes(shape: ModelShape, tensor_parallel: int, kv_bytes: int, block_tokens: int) -> int:
    """Bytes of one block of all layers on one GPU; KV heads are copied where there are fewer than GPUs."""
    heads = max(shape.num_kv_heads // tensor_parallel, 1)
    return 2 * block_tokens * heads * shape.head_dim * kv_bytes * shape.num_layers


def sharded_params(shape: ModelShape, tensor_parallel: int, expert_parallel: int) -> float:
    """Parameters of one GPU of an engine: experts over one group, everything else over the other."""
    experts = shape.expert_params * shape.num_mixture_layers
    return (shape.num_params - experts) / tensor_parallel + experts / max(tensor_parallel, expert_parallel)


def _buffers(shape: ModelShape, transfer: Transfer) -> float:
    """The buffers of the transfer, and the weight that is put together beside them if it is larger than one."""
    largest = largest_sent(shape) * transfer.sent_bytes
    merged = largest if transfer.merges and largest > transfer.bucket_bytes else 0.0
    return transfer.generator_buckets * transfer.bucket_bytes + merged


def generator_memory(shape: ModelShape, setup: GeneratorSetup) -> GeneratorMemory:
    """Estimate the memory of one GPU that generates.

    vLLM takes its share of the GPU, measures what weights and one step of the greatest size need, and gives the rest to
    the cache. That step is estimated here: residual stream, gate, up and product of its tokens, and FP32 logits of its
    sequences with their log-probs.
    """
    weights = setup.weight_bytes * sharded_params(shape, setup.tensor_parallel, setup.expert_parallel)
    width = 2 * shape.hidden + 3 * shape.active_intermediate / setup.tensor_parallel
    if shape.num_mixture_layers:
        width += 2 * shape.experts_per_token * shape.hidden
    profile = setup.max_num_batched_tokens * width * setup.weight_bytes + 2 * FP32 * setup.max_num_seqs * shape.vocab
    budget = setup.utilization * setup.gpu_bytes
    block = kv_block_bytes(shape, setup.tensor_parallel, setup.kv_bytes, setup.block_tokens)
    left = budget - weights - profile - setup.reserve_bytes
    staged = staged_bytes(shape, setup.transfer)
    return GeneratorMemory(
        budget=budget,
        weights=weights,
        profile=profile,
        reserve=setup.reserve_bytes,
        staged=staged if setup.transfer.staging == DEVICE else 0.0,
        buffers=_buffers(shape, setup.transfer),
        host=staged if setup.transfer.staging == HOST else 0.0,
        block=block,
        num_blocks=max(math.floor(left / block), 0),
        block_tokens=setup.block_tokens,
        blocks_per_sequence=math.ceil(setup.max_model_len / setup.block_tokens),
    )
