# SPDX-License-Identifier: Apache-2.0
"""What a weight update sends, in which dtype, and what memory it takes on the way.

Arithmetic in the standard library. Tests compare it with what verl's FSDP engine hands out and the staging buffer
allocates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scalerl_verl import names
from scalerl_verl.names import BUCKET, CHECKPOINT_BACKEND, FSDP, GLOO, HOST, NONE, PIPELINE_RL, ROLLOUT, STAGING, select
from scalerl_verl.names.asking import is_cpu_platform, trainer_mode
from scalerl_verl.names.keys import value_of
from scalerl_verl.pipeline.pieces import pieces_bytes
from scalerl_verl.shapes import ModelShape

MODEL_DTYPE = f"{FSDP}.model_dtype"
SEPARATE = ("separate_async", PIPELINE_RL)
"""Trainer modes with GPUs that only generate."""
DTYPES = {
    "fp32": "float32", "float32": "float32", "float": "float32",
    "bf16": "bfloat16", "bfloat16": "bfloat16",
    "fp16": "float16", "float16": "float16", "half": "float16",
}  # fmt: skip
"""verl's and vLLM's names of a dtype -> PyTorch's."""
BYTES = {name: 4 if dtype == "float32" else 2 for name, dtype in DTYPES.items()}
MIB = 2**20


@dataclass(frozen=True)
class Transfer:
    """How weights get from the trainer into generators.

    Args:
        sent_bytes: bytes of one element as it is sent.
        bucket_bytes: of one buffer (``checkpoint_engine.update_weights_bucket_megabytes``).
        trainer_buckets: buffers on a GPU that trains.
        generator_buckets: buffers on a GPU that generates.
        staging: where a generator collects them while it goes on: ``device``, ``host``, or ``none``.
        merges: whether a weight larger than a bucket is put together beside the buffers of the generator.
        needs_room: whether every weight has to fit into one bucket, on pain of verl's assertion.
    """

    sent_bytes: int = 2
    bucket_bytes: float = 0.0
    trainer_buckets: int = 0
    generator_buckets: int = 0
    staging: str = NONE
    merges: bool = False
    needs_room: bool = False


NO_TRANSFER = Transfer(sent_bytes=0)
"""Nothing is sent."""


def generator_dtype(config: Any, rollout: str = ROLLOUT) -> str | None:
    """PyTorch's name of the dtype in which vLLM holds a model; None if vLLM chooses it (``auto``).

    Args:
        config: a DictConfig.
        rollout: path of the rollout's section in it.
    """
    name = select(config, f"{rollout}.engine_kwargs.vllm.dtype", select(config, f"{rollout}.dtype", "bfloat16"))
    return DTYPES.get(str(name).removeprefix("torch."))


def read_transfer(config: Any) -> Transfer:
    """Read a composed config.

    In pipeline_rl a weight is sent in the narrower of its own and the generator's dtype; verl's modes send it as it is.
    Within a GPU verl hands weights to vLLM through a bucket of its own: CUDA's IPC, or shared memory on the CPU, where
    a weight that does not fit is an assertion.
    """
    mode, backend = trainer_mode(config), str(select(config, CHECKPOINT_BACKEND, "naive"))
    separate, pipeline = mode in SEPARATE, mode == PIPELINE_RL
    staging = str(value_of(config, STAGING)) if pipeline else NONE
    if staging != NONE and backend == GLOO:
        staging = HOST  # which is where gloo delivers
    stored = BYTES.get(str(select(config, MODEL_DTYPE, "fp32")), 4)
    wanted = generator_dtype(config) if pipeline else None
    through_gpu = separate and backend != GLOO
    return Transfer(
        sent_bytes=min(stored, BYTES[wanted]) if wanted else stored,
        bucket_bytes=float(select(config, BUCKET, names.VERL_BUCKET_MB)) * MIB,
        trainer_buckets=2 * through_gpu,
        generator_buckets=2 * through_gpu + (separate and staging == NONE),
        staging=staging,
        merges=through_gpu,
        needs_room=(staging == NONE and is_cpu_platform()) or (separate and backend == "mooncake"),
    )


def sent_weights(shape: ModelShape) -> Iterator[int]:
    """Number of elements of each weight, in the order in which verl's FSDP engine sends them, without a tied head."""
    yield shape.vocab * shape.hidden
    for index in range(shape.num_layers):
        yield from _layer(shape, index < shape.num_mixture_layers)
    yield shape.hidden
    if not shape.tied:
        yield shape.vocab * shape.hidden


def largest_sent(shape: ModelShape) -> int:
    """Number of elements of the largest weight that is sent; each expert is sent as a weight of its own."""
    return max(sent_weights(shape))


def largest_gathered(shape: ModelShape) -> int:
    """Number of elements that a training GPU gathers at once to send them.

    A mixture's experts are gathered as one weight (up and gate projections of all), while verl still holds those of the
    layer before.
    """
    fused = 2 * shape.expert_params * 2 // 3 if shape.num_mixture_layers else 0
    return max(largest_sent(shape), fused)


def staged_bytes(shape: ModelShape, transfer: Transfer) -> float:
    """Bytes of one staged copy of the whole model, pieces counted whole."""
    if transfer.staging == NONE:
        return 0.0
    return float(pieces_bytes(numbers * transfer.sent_bytes for numbers in sent_weights(shape)))


def bucket_problem(transfer: Transfer, largest: int) -> str | None:
    """What verl's assertion would say a minute after the start; None if every weight fits.

    Args:
        transfer: of the run.
        largest: number of elements of the largest weight.
    """
    needed = largest * transfer.sent_bytes
    if not transfer.needs_room or needed <= transfer.bucket_bytes:
        return None
    return (
        f"{BUCKET}={transfer.bucket_bytes / MIB:g} is smaller than the largest weight of the model, {needed / MIB:.1f} "
        f"MiB ({largest:,} numbers of {transfer.sent_bytes} bytes), which has to fit into one bucket here: set it to "
        f"{-(-needed // MIB)} or more"
    )


def _layer(shape: ModelShape, mixture: bool) -> Iterator[int]:
    hidden, out_bias = shape.hidden, shape.num_attention_biases > shape.q_size + 2 * shape.kv_size
    for size in (shape.q_size, shape.kv_size, shape.kv_size):
        yield hidden * size
        if shape.num_attention_biases:
            yield size
    yield shape.q_size * hidden
    if out_bias:
        yield hidden
    if shape.num_norm_weights:
        yield from (shape.head_dim, shape.head_dim)
    yield from _experts(shape) if mixture else _dense(shape)
    yield from (hidden, hidden)


def _dense(shape: ModelShape) -> Iterator[int]:
    biases = (shape.intermediate, shape.intermediate, shape.hidden) if shape.num_mlp_biases else (0, 0, 0)
    for bias in biases:
        yield shape.hidden * shape.intermediate
        if bias:
            yield bias


def _experts(shape: ModelShape) -> Iterator[int]:
    """Gate and up of every expert, then down of every expert; the router before them or after."""
    first = shape.model_type == "mixtral"
    if first:
        yield shape.router_params
    yield from [shape.hidden * shape.expert_intermediate] * (3 * shape.num_experts)
    if not first:
        yield shape.router_params
