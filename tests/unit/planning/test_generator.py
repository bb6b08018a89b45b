# SPDX-License-Identifier: Apache-2.0
"""Generator memory against vLLM's own specification of its cache, and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scalerl_verl.pipeline.transfer import Transfer, staged_bytes
from scalerl_verl.planning.generator import GeneratorSetup, generator_memory, kv_block_bytes, sharded_params
from scalerl_verl.shapes import find_shape

GIB = 2**30
DENSE, MIXTURE = find_shape("Qwen/Qwen3-8B-Base"), find_shape("Qwen/Qwen3-30B-A3B-Base")
SETUP = GeneratorSetup(
    gpu_bytes=80 * GIB,
    utilization=0.75,
    tensor_parallel=1,
    max_model_len=16384,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    reserve_bytes=4 * GIB,
)


@pytest.mark.parametrize("shape", [DENSE, MIXTURE])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_block_is_as_large_as_vllm_makes_it(shape, tensor_parallel, dtype) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    heads = max(1, shape.num_kv_heads // tensor_parallel)  # as ModelConfig.get_num_kv_heads
    spec = FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=shape.head_dim, dtype=dtype)
    assert kv_block_bytes(shape, tensor_parallel, dtype.itemsize, 16) == shape.num_layers * spec.page_size_bytes


def test_cache_by_hand() -> None:
    """8.19B parameters in bf16 are 15.26 GiB; a token's keys and values 2 x 36 x 8 x 128 x 2 = 144 KiB."""
    memory = generator_memory(DENSE, SETUP)
    assert memory.block == 16 * 147456
    assert memory.weights == 2 * 8190735360
    profile = 8192 * (2 * 4096 + 3 * 12288) * 2 + 8 * 256 * 151936
    left = 60 * GIB - 2 * 8190735360 - profile - 4 * GIB
    assert memory.num_blocks == left // (16 * 147456)
    assert memory.num_longest == memory.num_blocks / 1024
    assert 17 < memory.num_longest < 18


def test_tensor_parallelism_splits_weights_and_heads_until_there_is_one_head_a_gpu() -> None:
    assert sharded_params(DENSE, 4, 1) == DENSE.num_params / 4
    assert kv_block_bytes(DENSE, 16, 2, 16) == kv_block_bytes(DENSE, 8, 2, 16) == kv_block_bytes(DENSE, 1, 2, 16) / 8


def test_experts_spread_over_their_own_group() -> None:
    experts = 48 * 128 * 3 * 2048 * 768
    assert sharded_params(MIXTURE, 1, 8) == MIXTURE.num_params - experts + experts / 8


def test_weight_update_needs_the_whole_model_and_its_buffers_on_every_gpu() -> None:
    """Each rank of an engine receives all weights, whatever it keeps of them in the end."""
    transfer = Transfer(bucket_bytes=2 * GIB, generator_buckets=2, staging="device", merges=True)
    for tensor_parallel in (1, 8):
        setup = replace(SETUP, tensor_parallel=tensor_parallel, transfer=transfer)
        memory = generator_memory(DENSE, setup)
        assert memory.staged == staged_bytes(DENSE, transfer) >= 2 * DENSE.num_params
        assert memory.outside == memory.staged + 4 * GIB and memory.host == 0
        assert memory.peak == 60 * GIB + memory.outside
    assert generator_memory(DENSE, SETUP).outside == 0


def test_weights_that_wait_in_host_memory_take_none_of_the_gpu() -> None:
    setup = replace(SETUP, transfer=Transfer(bucket_bytes=GIB, generator_buckets=2, staging="host", merges=True))
    memory = generator_memory(DENSE, setup)
    assert memory.staged == 0 and memory.host == staged_bytes(DENSE, setup.transfer)
    # The embedding has 1.16 GiB: verl puts it together beside two buffers of 1 GiB.
    assert memory.outside == 2 * GIB + 2 * 151936 * 4096


def test_too_small_a_share_leaves_no_block() -> None:
    assert generator_memory(DENSE, replace(SETUP, utilization=0.2)).num_blocks == 0
