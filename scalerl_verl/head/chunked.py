# SPDX-License-Identifier: Apache-2.0
"""The head in chunks of tokens: a matrix product into FP32 logits, one pass over them, and again in backward.

Four matrix products in all: logits forward, logits again, and the gradients of hidden states and weight. On CUDA the
passes are Triton kernels, so the logits of a chunk are written once and read once per pass.

Shape legend: N tokens, H hidden size, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from scalerl_verl.head import rows
from scalerl_verl.head.matmul import add_mm_fp32_, exact_fp32, mm_fp32, upcast

CHUNK_BYTES = 13 << 27
"""FP32 logits that exist at once (1.6 GiB): 2,816 tokens at a vocabulary of 152k. Larger chunks add to the weight's
gradient fewer times (a pass over V x H FP32 numbers each) and cost memory."""

ROW_MULTIPLE = 128
"""Chunks are cut at multiples of a matrix tile's rows where they are large enough."""

ALL = slice(None)
"""Selects every token without a copy."""


def linear_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_N: torch.Tensor,
    temperature: float | torch.Tensor,
    chunk_rows: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and entropies, [N] FP32 each (see `functional.linear_logprobs`)."""
    hidden_NH, weight_VH = promote(hidden_NH, weight_VH)
    logp_N, entropy_N = _LinearLogProbs.apply(
        hidden_NH,
        weight_VH,
        labels_N,
        1.0 / temperature,
        chunk_rows or default_chunk_rows(len(hidden_NH), len(weight_VH)),
    )
    return logp_N, entropy_N


def promote(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both operands in one dtype, no narrower than either."""
    dtype = torch.promote_types(hidden_NH.dtype, weight_VH.dtype)
    return hidden_NH.to(dtype), weight_VH.to(dtype)


def default_chunk_rows(num_rows: int, num_columns: int) -> int:
    """Return the tokens per chunk: chunks of like size whose logits fit in `CHUNK_BYTES`."""
    most = max(CHUNK_BYTES // (4 * num_columns) // ROW_MULTIPLE * ROW_MULTIPLE, 1)
    num_chunks = max(-(-num_rows // most), 1)
    even = max(-(-num_rows // num_chunks), 1)
    return min(-(-even // ROW_MULTIPLE) * ROW_MULTIPLE, most)


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


class _LinearLogProbs(torch.autograd.Function):
    """Logits are made again in backward instead of kept: N x V numbers never exist at once."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Any, weight_VH: Any, labels_N: Any, scale: Any, chunk_rows: int) -> Any:
        with torch.autocast(hidden_NH.device.type, enabled=False):
            head = HeadProducts(weight_VH)
            dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
            logp_N, lse_N, entropy_N = torch.empty(3, len(hidden_NH), dtype=dtype, device=hidden_NH.device)
            for at in chunks(len(hidden_NH), chunk_rows):
                logits_CV = head.logits(hidden_NH[at])
                statistics = passes(logits_CV).row_statistics(logits_CV, labels_N[at], part(scale, at))
                logp_N[at], lse_N[at], entropy_N[at] = statistics
                del logits_CV  # before the next chunk's are made
        is_tensor = isinstance(scale, torch.Tensor)
        ctx.save_for_backward(hidden_NH, weight_VH, labels_N, lse_N, entropy_N, scale if is_tensor else None)
        ctx.scale, ctx.chunk_rows = None if is_tensor else scale, chunk_rows
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden_NH, weight_VH, labels_N, lse_N, entropy_N, scale = ctx.saved_tensors
        if all(grad_N is None for grad_N in grads):
            return None, None, None, None, None
        per_token = [labels_N, ctx.scale if scale is None else scale, lse_N, entropy_N, *grads]
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        with torch.autocast(hidden_NH.device.type, enabled=False):
            kept_N = active_tokens(*grads)
            active_NH = part(hidden_NH, kept_N)
            grad_hidden_NH, grad_weight_VH = _backward_chunks(
                active_NH, weight_VH, [part(v, kept_N) for v in per_token], ctx.chunk_rows, need_hidden, need_weight
            )
            if grad_hidden_NH is not None and kept_N is not ALL:
                grad_hidden_NH = torch.zeros_like(hidden_NH).index_copy_(0, kept_N, grad_hidden_NH)
        return grad_hidden_NH, grad_weight_VH, None, None, None


def chunks(num_rows: int, chunk_rows: int) -> list[slice]:
    """Return the chunks of `num_rows` tokens, of `chunk_rows` each but the last."""
    return [slice(start, min(start + chunk_rows, num_rows)) for start in range(0, num_rows, chunk_rows)]


def active_tokens(*grads: torch.Tensor | None) -> Any:
    """Return the indices of tokens with a non-zero upstream gradient, [K], or `ALL` if every token has one.

    Prompt tokens and masked ones have none: leaving them out saves their share of three matrix products and keeps
    whatever their hidden states hold (NaN even) out of the weight's gradient. NaN counts as non-zero: it must surface.
    """
    present = [grad_N != 0 for grad_N in grads if grad_N is not None]
    active_N = torch.stack(present).any(dim=0)
    kept_N = active_N.nonzero()[:, 0]
    return ALL if len(kept_N) == len(active_N) else kept_N


def _backward_chunks(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    per_token: list[Any],
    chunk_rows: int,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of hidden states and weight in their dtypes, the weight's summed over chunks in FP32."""
    head = HeadProducts(weight_VH)
    grad_hidden_NH = torch.empty_like(hidden_NH) if need_hidden else None
    total_VH = None
    for at in chunks(len(hidden_NH), chunk_rows):
        logits_CV = head.logits(hidden_NH[at])
        grad_CV = passes(logits_CV).row_gradient(logits_CV, *(part(v, at) for v in per_token), head.grad_dtype)
        del logits_CV
        if grad_hidden_NH is not None:
            head.hidden_gradient(grad_CV, grad_hidden_NH[at])
        if need_weight:
            total_VH = head.add_weight_gradient(total_VH, grad_CV, hidden_NH[at])
        del grad_CV
    if not need_weight:
        return grad_hidden_NH, None
    return grad_hidden_NH, torch.zeros_like(weight_VH) if total_VH is None else total_VH.to(weight_VH.dtype)
