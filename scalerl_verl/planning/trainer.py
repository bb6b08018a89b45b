# SPDX-License-Identifier: Apache-2.0
"""Memory of one GPU that trains, as verl's FSDP engines lay it out.

Five moments compete for the peak: the output layer (all checkpointed activations exist, and the head's logits), the
backward pass of one layer (its activations are made again), the reduction of the largest unit's gradient, the
optimizer step, and the weight update. Each is on top of what stays: sharded weights, gradients and optimizer state.

Bytes throughout. What is saved for backward is counted tensor by tensor and compared in tests with what autograd keeps
of transformers' layers; the head with recorded peaks (`benchmarks/results/fp32_head.jsonl`). Kernel workspaces and the
allocator's fragmentation are not counted: the reserve of a plan stands for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from scalerl_verl.pipeline.transfer import NO_TRANSFER, Transfer, largest_gathered
from scalerl_verl.planning.adapters import Adapters
from scalerl_verl.shapes import ModelShape

FP32 = 4
INDEX_BYTES = 33
"""Of one token's copy for one expert: four int64 indices and a mask."""


@dataclass(frozen=True)
class TrainerSetup:
    """How a model is trained on one GPU.

    Args:
        num_shards: GPUs over which weights are sharded.
        tokens: of one micro-batch on this GPU (after sequence parallelism).
        master_bytes: of a stored weight (``fsdp_config.model_dtype``), its gradient and each optimizer state.
        compute_bytes: of a gathered weight and an activation (``fsdp_config.dtype``, or ``mixed_precision``).
        reduce_bytes: of a gradient while it is reduced.
        num_optimizer_states: numbers the optimizer keeps a parameter (AdamW: 2).
        checkpointing: whether layers are recomputed in backward.
        fused_head: whether log-probs come out of the head in chunks (``model.use_fused_kernels``).
        reshard: whether layers are given back after forward.
        defer_sync: whether gradients stay unsharded until the last micro-batch.
        cpu_offload: whether weights, gradients and optimizer state live on the host (FSDP2's offload_policy).
        transfer: how weights leave it.
        padded_length: longest sequence of a padded micro-batch (``use_remove_padding=False``); 0: packed.
        adapters: what trains in the place of the whole model, of which verl stores the rest in the same dtype.
    """

    num_shards: int
    tokens: int
    master_bytes: int = 4
    compute_bytes: int = 2
    reduce_bytes: int = 4
    num_optimizer_states: int = 2
    checkpointing: bool = True
    fused_head: bool = True
    reshard: bool = True
    defer_sync: bool = False
    cpu_offload: bool = False
    transfer: Transfer = NO_TRANSFER
    padded_length: int = 0
    adapters: Adapters | None = None


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on one GPU that trains: what stays, the moments that compete, and their parts."""

    weights: float
    gradients: float
    optimizer: float
    unsharded_gradients: float
    transfer: float
    activations: float
    head: float
    gathered: float
    moments: dict[str, float]

    @property
    def resident(self) -> float:
        """Between two steps: gradients are gone, everything else stays."""
        return self.weights + self.optimizer + self.transfer

    @property
    def peak(self) -> float:
        """At the worst moment of an update."""
        return self.resident + self.gradients + self.unsharded_gradients + max(self.moments.values())


def layer_activation_bytes(
    shape: ModelShape, mixture: bool, compute_bytes: int, adapters: Adapters | None = None
) -> int:
    """Bytes that backward of one decoder layer needs, for each token, attention never making its scores.

    Norms keep their input in FP32, their result before and after the gain, and a statistic; attention its rotated
    queries, its keys, values, result and a log-sum-exp a head; the feed-forward part its gate, up, activated gate and
    product, in a mixture for every expert of a token together with the copies that go in and come out.

    With adapters a norm's gain does not train, so its result before the gain is not needed; each adapter keeps ``rank``
    numbers. The inputs of matrices without an adapter are counted, although they are not needed.
    """
    c, hidden = compute_bytes, shape.hidden
    total = 2 * (FP32 * hidden + 2 * c * hidden + FP32)
    if shape.num_norm_weights:
        total += (FP32 + c) * (shape.q_size + shape.kv_size) + FP32 * (shape.num_heads + shape.num_kv_heads)
    total += c * (2 * shape.q_size + 2 * shape.kv_size) + FP32 * shape.num_heads
    if adapters:
        total += c * adapters.rank * len(adapters.targets) - 2 * c * hidden
        total -= c * (shape.q_size + shape.kv_size) if shape.num_norm_weights else 0
    if not mixture:
        return total + 4 * c * shape.intermediate
    k = shape.experts_per_token
    return total + FP32 * shape.num_experts + k * (INDEX_BYTES + c + 2 * c * hidden + 4 * c * shape.expert_intermediate)


def padding_bytes(shape: ModelShape, padded_length: int, compute_bytes: int) -> int:
    """Bytes of one layer for each token on top of `layer_activation_bytes` where sequences are padded.

    A mask makes transformers repeat grouped keys and values for every query head, and PyTorch turn the mask into
    numbers anew in every layer, which backward needs: a row of the longest sequence's length a token.
    """
    return compute_bytes * (2 * (shape.q_size - shape.kv_size) + padded_length) if padded_length else 0


def head_bytes(shape: ModelShape, tokens: int, compute_bytes: int, fused: bool, frozen: bool = False) -> float:
    """Bytes of the output layer's forward and backward on top of its operands.

    Fused: FP32 logits of one chunk, the weight's gradient in FP32 unless it is frozen, and the hidden states' gradient.
    Otherwise three copies of all logits in FP32 (logits, log-softmax and its gradient), whatever dtype they begin in.
    """
    if not fused:
        return 3 * FP32 * tokens * shape.vocab
    from scalerl_verl.head.chunked import default_chunk_rows

    rows = min(tokens, default_chunk_rows(shape.vocab))
    return FP32 * shape.vocab * (rows + (0 if frozen else shape.hidden)) + compute_bytes * tokens * shape.hidden


def trainer_memory(shape: ModelShape, setup: TrainerSetup) -> TrainerMemory:
    """Estimate the memory of one GPU that trains."""
    c, adapters = setup.compute_bytes, setup.adapters
    num_adapters, layer_adapters = (adapters.num_params(shape), adapters.layer_params(shape)) if adapters else (0, 0)
    num_trained = num_adapters if adapters else shape.num_params
    stored, trained = (
        0.0 if setup.cpu_offload else setup.master_bytes * number / setup.num_shards
        for number in (shape.num_params + num_adapters, num_trained)
    )
    root, layer = shape.embedding_params + shape.hidden, shape.largest_layer_params
    kinds = [i < shape.num_mixture_layers for i in range(shape.num_layers)]
    padding = padding_bytes(shape, setup.padded_length, c)
    saved = [(layer_activation_bytes(shape, mixture, c, adapters) + padding) * setup.tokens for mixture in kinds]
    checkpoint = c * shape.hidden * setup.tokens
    activations = checkpoint * len(saved) if setup.checkpointing else sum(saved)
    # Two layers at once: the next is gathered while one computes.
    gathered = c * (shape.num_params + num_adapters if not setup.reshard else root + 2 * (layer + layer_adapters))
    head = head_bytes(shape, setup.tokens, c, setup.fused_head, frozen=adapters is not None)
    trained_root, trained_layer = (0, layer_adapters) if adapters else (root, layer)
    again = (max(saved) if setup.checkpointing else 0) + 3 * c * shape.active_intermediate * setup.tokens
    moments = {
        "head": activations + gathered + head,
        "layer": activations + gathered + again + c * trained_root + (c + setup.reduce_bytes) * trained_layer,
        "reduction": c * root + (c + setup.reduce_bytes) * trained_root,
        "optimizer step": trained,
        # One parameter after the other is gathered as it is sent.
        "weight update": setup.transfer.sent_bytes * largest_gathered(shape),
    }
    return TrainerMemory(
        weights=stored,
        gradients=trained,
        optimizer=trained * setup.num_optimizer_states,
        unsharded_gradients=FP32 * num_trained if setup.defer_sync else 0.0,
        transfer=setup.transfer.trainer_buckets * setup.transfer.bucket_bytes,
        activations=activations,
        head=head,
        gathered=gathered,
        moments=moments,
    )
