# SPDX-License-Identifier: Apache-2.0
"""The head in chunks of tokens: a matrix product into FP32 logits, one pass over them, and again in backward.

Four matrix products in all: logits forward, logits again, and the gradients of hidden states and weight. The logits of
the last chunk are not made again: they stay from forward to backward, where a chunk's logits exist anyway. On CUDA the
passes are Triton kernels, so the logits of a chunk are written once and read once per pass.

Shape legend: N tokens, H hidden size, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from scalerl_verl.head import rows
from scalerl_verl.head.matmul import add_mm_fp32_, exact_fp32, mm_fp32, upcast

CHUNK_BYTES = 14 << 27
"""FP32 logits that exist at once (1.75 GiB): 3,072 tokens at a vocabulary of 152k. Larger chunks add to the weight's
gradient fewer times (a pass over V x H FP32 numbers each) and cost memory."""

ROW_MULTIPLES = (1024, 128)
"""Chunks are cut at a multiple of the first of these that fits. 128 rows are a tile of a product. The gradient of
hidden states has few tiles: at a width of 4,096 on an H100, 1,024 rows of them occupy 128 of 132 processors, so 3,072
rows take less time than 2,816."""


def linear_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_N: torch.Tensor,
    temperature: float | torch.Tensor,
    chunk_rows: int | None,
    shard: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and entropies, [N] FP32 each (see `functional.linear_logprobs`).

    Args:
        shard: `sharded.VocabShard` if the weight is a part of the head's; labels are rows of this part then.
    """
    hidden_NH, weight_VH = promote(hidden_NH, weight_VH)
    with_backward = torch.is_grad_enabled() and (hidden_NH.requires_grad or weight_VH.requires_grad)
    logp_N, entropy_N = _LinearLogProbs.apply(
        hidden_NH,
        weight_VH,
        labels_N,
        1.0 / temperature,
        chunk_rows or default_chunk_rows(len(weight_VH)),
        with_backward,
        shard,
    )
    return logp_N, entropy_N


def promote(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both operands in one dtype, no narrower than either."""
    dtype = torch.promote_types(hidden_NH.dtype, weight_VH.dtype)
    return hidden_NH.to(dtype), weight_VH.to(dtype)


def default_chunk_rows(num_columns: int) -> int:
    """Return the tokens per chunk: as many as have logits within `CHUNK_BYTES`, cut at one of `ROW_MULTIPLES`."""
    most = max(CHUNK_BYTES // (4 * num_columns), 1)
    return next((most // multiple * multiple for multiple in ROW_MULTIPLES if most >= multiple), most)


def passes(logits: torch.Tensor) -> Any:
    """Return the module whose row passes suit these logits: Triton for FP32 on CUDA, else PyTorch."""
    if logits.device.type != "cuda" or logits.dtype != torch.float32:
        return rows
    try:
        from scalerl_verl.head import rows_triton
    except ImportError as error:
        raise RuntimeError(
            "The FP32 head needs Triton on CUDA and could not import it. Install the Triton that belongs to this "
            "PyTorch (its CUDA wheels depend on it)."
        ) from error
    return rows_triton


def part(values: Any, at: Any) -> Any:
    """Return the selected tokens of a per-token tensor; a number or None as it is."""
    return values[at] if isinstance(values, torch.Tensor) else values


class HeadProducts:
    """The matrix products of one head, its weight prepared once for all chunks of a call.

    Where no product takes 16-bit operands into FP32 (the CPU), the upcast weight lives as long as this object: one
    call. Nothing is kept between calls, so nothing can go stale.
    """

    def __init__(self, weight_VH: torch.Tensor):
        self.native = weight_VH.device.type == "cuda"
        self.weight_VH = weight_VH if self.native else upcast(weight_VH)

    @property
    def grad_dtype(self) -> torch.dtype:
        """dtype in which the gradient of the logits enters its two products."""
        return self.weight_VH.dtype

    def logits(self, hidden_CH: torch.Tensor) -> torch.Tensor:
        """Return FP32 (float64) logits, [C, V], before temperature."""
        return mm_fp32(hidden_CH if self.native else upcast(hidden_CH), self.weight_VH.t())

    def add_weight_gradient(
        self, total_VH: torch.Tensor | None, grad_CV: torch.Tensor, hidden_CH: torch.Tensor
    ) -> torch.Tensor:
        """Return the FP32 sum of the weight's gradient with this chunk's added, [V, H]."""
        if total_VH is None:
            return mm_fp32(grad_CV.t(), hidden_CH)
        add_mm_fp32_(total_VH, grad_CV.t(), hidden_CH)
        return total_VH

    def hidden_gradient(self, grad_CV: torch.Tensor, out_CH: torch.Tensor) -> None:
        """Write the gradient of a chunk's hidden states, [C, H]; a 16-bit result is rounded once, at the end."""
        if grad_CV.dtype == out_CH.dtype:
            with exact_fp32():
                torch.mm(grad_CV, self.weight_VH, out=out_CH)
        else:
            out_CH.copy_(mm_fp32(grad_CV, self.weight_VH))


class HeadGradients:
    """The gradients of hidden states and weight, added to chunk by chunk; the weight's sum is FP32."""

    def __init__(
        self,
        head: HeadProducts,
        hidden_NH: torch.Tensor,
        need_hidden: bool,
        need_weight: bool,
        hidden_dtype: torch.dtype | None = None,
    ):
        self.head, self.hidden_NH, self.need_weight = head, hidden_NH, need_weight
        self.hidden_grad_NH = torch.zeros_like(hidden_NH, dtype=hidden_dtype) if need_hidden else None
        self.weight_total_VH: torch.Tensor | None = None

    def add(self, grad_CV: torch.Tensor, rows: slice | torch.Tensor) -> None:
        """Add the part of some tokens (a slice of all, or their indices) from the gradient of their logits."""
        if self.hidden_grad_NH is not None:
            if isinstance(rows, slice):
                self.head.hidden_gradient(grad_CV, self.hidden_grad_NH[rows])
            else:
                part_CH = self.hidden_grad_NH.new_empty(len(rows), self.hidden_grad_NH.shape[1])
                self.head.hidden_gradient(grad_CV, part_CH)
                self.hidden_grad_NH.index_copy_(0, rows, part_CH)
        if self.need_weight:
            self.weight_total_VH = self.head.add_weight_gradient(self.weight_total_VH, grad_CV, self.hidden_NH[rows])

    def weight(self, weight_VH: torch.Tensor) -> torch.Tensor | None:
        """Return the weight's gradient in its dtype; zero if no token had one."""
        if not self.need_weight:
            return None
        return torch.zeros_like(weight_VH) if self.weight_total_VH is None else self.weight_total_VH.to(weight_VH.dtype)


class _LinearLogProbs(torch.autograd.Function):
    """Logits are made again in backward instead of kept, but for one chunk: N x V numbers never exist at once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Any,
        weight_VH: Any,
        labels_N: Any,
        scale: Any,
        chunk_rows: int,
        keep_last: bool,
        shard: Any,
    ) -> Any:
        logits_CV = None
        with torch.autocast(hidden_NH.device.type, enabled=False):
            head = HeadProducts(weight_VH)
            dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
            logp_N, lse_N, entropy_N = torch.empty(3, len(hidden_NH), dtype=dtype, device=hidden_NH.device)
            for at in chunks(len(hidden_NH), chunk_rows):
                logits_CV = None  # before the next chunk's are made
                logits_CV = head.logits(hidden_NH[at])
                statistics = passes(logits_CV).row_statistics(logits_CV, labels_N[at], part(scale, at))
                logp_N[at], lse_N[at], entropy_N[at] = statistics
        if shard is not None:
            logp_N, lse_N, entropy_N = shard.combine(logp_N, lse_N, entropy_N)
        is_tensor = isinstance(scale, torch.Tensor)
        ctx.save_for_backward(hidden_NH, weight_VH, labels_N, lse_N, entropy_N, scale if is_tensor else None)
        ctx.scale, ctx.chunk_rows, ctx.shard = None if is_tensor else scale, chunk_rows, shard
        # Not a saved tensor: backward writes over it, and hooks that move saved tensors to the host shall not see it.
        ctx.last_logits_CV = logits_CV if keep_last else None
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden_NH, weight_VH, labels_N, lse_N, entropy_N, scale = ctx.saved_tensors
        logits_CV, ctx.last_logits_CV = ctx.last_logits_CV, None  # a second backward makes them again
        if all(grad_N is None for grad_N in grads):
            return (None,) * 7
        per_token = [labels_N, ctx.scale if scale is None else scale, lse_N, entropy_N, *grads]
        with torch.autocast(hidden_NH.device.type, enabled=False):
            head = HeadProducts(weight_VH)
            hidden_dtype = None if ctx.shard is None else ctx.shard.partial_dtype(hidden_NH.dtype)
            need_hidden, need_weight = ctx.needs_input_grad[:2]
            gradients = HeadGradients(head, hidden_NH, need_hidden, need_weight, hidden_dtype)
            num_left = len(hidden_NH)
            if logits_CV is not None:
                num_left -= len(logits_CV)
                rows_C = active_tokens(*grads, at=slice(num_left, len(hidden_NH)))
                if isinstance(rows_C, slice) or len(rows_C):
                    grad_CV = _row_gradient(logits_CV, per_token, slice(num_left, None), head)
                    if isinstance(rows_C, torch.Tensor):
                        grad_CV = grad_CV[rows_C - num_left]
                    del logits_CV  # a copy of few rows must not hold the memory of all
                    gradients.add(grad_CV, rows_C)
                    del grad_CV
                else:
                    del logits_CV
            active = active_tokens(*grads, at=slice(0, num_left))
            num_active = len(active) if isinstance(active, torch.Tensor) else num_left
            for at in chunks(num_active, ctx.chunk_rows):
                rows = active[at] if isinstance(active, torch.Tensor) else at
                grad_CV = _row_gradient(head.logits(hidden_NH[rows]), per_token, rows, head)
                gradients.add(grad_CV, rows)
                del grad_CV
        hidden_grad_NH = gradients.hidden_grad_NH
        if ctx.shard is not None and hidden_grad_NH is not None:
            hidden_grad_NH = ctx.shard.add_up(hidden_grad_NH, hidden_NH.dtype)
        return hidden_grad_NH, gradients.weight(weight_VH), None, None, None, None, None


def chunks(num_rows: int, chunk_rows: int) -> list[slice]:
    """Return the chunks of `num_rows` tokens, of `chunk_rows` each but the first, which has the rest.

    The last is as large as any, since its logits are kept for backward.
    """
    stops = range(num_rows, 0, -chunk_rows)
    return [slice(max(stop - chunk_rows, 0), stop) for stop in reversed(stops)]


def active_tokens(*grads: torch.Tensor | None, at: slice) -> slice | torch.Tensor:
    """Return the indices of the tokens of a slice with a non-zero upstream gradient, [K], or the slice if all have one.

    Prompt tokens and masked ones have none: leaving them out saves their share of three matrix products and keeps
    whatever their hidden states hold (NaN even) out of the weight's gradient. NaN counts as non-zero: it must surface.
    """
    present = [grad_N[at] != 0 for grad_N in grads if grad_N is not None]
    active_C = torch.stack(present).any(dim=0)
    rows_K = active_C.nonzero()[:, 0]
    return at if len(rows_K) == len(active_C) else rows_K + at.start


def _row_gradient(
    logits_CV: torch.Tensor, per_token: list[Any], rows: slice | torch.Tensor, head: HeadProducts
) -> torch.Tensor:
    """Return the gradient of some tokens' logits, in their memory where the pass allows it."""
    return passes(logits_CV).row_gradient(logits_CV, *(part(values, rows) for values in per_token), head.grad_dtype)
