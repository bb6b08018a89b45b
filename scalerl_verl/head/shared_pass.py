# SPDX-License-Identifier: Apache-2.0
"""The head with forward and backward in one pass over the logits: three matrix products instead of four.

Where the loss of a token is a known function of its own log-probability (CISPO: -sg(min(rho, eps_max)) A logp), its
gradient is known as soon as the log-probability is, while the logits of the chunk still exist. The gradients of hidden
states and weight are then made in forward. Backward checks that the loss that was really used agrees, and only scales.

Shape legend: N tokens, H hidden size, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from scalerl_verl.head.chunked import (
    HeadGradients,
    HeadProducts,
    active_tokens,
    chunks,
    default_chunk_rows,
    part,
    passes,
    promote,
)
from scalerl_verl.head.functional import LogProbs, check_arguments

TokenLoss = Callable[[torch.Tensor, slice], torch.Tensor]

AGREEMENT = 1.0e-4
"""Relative difference allowed between the gradient used in forward and the one that arrives: both are FP32 functions of
the same log-probability (rounding 1e-7 a step); a different loss is off by far more."""

NEGLIGIBLE = 1.0e-12
"""Share of the largest gradient of a token below which another's may be anything: it moves no bit of a sum."""


class LossMismatchError(RuntimeError):
    """The loss that was differentiated is not the token loss that the shared pass was told."""


def shared_pass_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    token_loss: TokenLoss,
    *,
    temperature: float | torch.Tensor = 1.0,
    chunk_rows: int | None = None,
) -> LogProbs:
    """Return what `linear_logprobs` returns; the gradients of a given token loss are computed in the same pass.

    This saves one of four matrix products. The loss that calls backward must be `factor * sum_t token_loss_t`, with one
    factor for all tokens (a mean, a loss scale); the factor need not be known in forward. Backward checks this and
    raises for any other loss of the log-probabilities. The entropy is returned without a gradient: an entropy bonus
    would train nothing and not raise, so use `linear_logprobs` for it.

    Args:
        hidden: last hidden states, [..., H], dtypes as in `linear_logprobs`.
        weight: weight of the LM head, [V, H], same dtypes.
        labels: token ids whose log-probabilities are returned, [...] integer in [0, V).
        token_loss: a function of (the log-probabilities of a chunk, [C] float32 with requires_grad; the slice of the
            flattened tokens that the chunk is). It returns the loss of each token, [C]. A token's loss may depend on
            its own log-probability only, and a masked token's loss must have gradient 0.
        temperature: divisor of the logits, > 0: one number, or one per token, [...] floating-point.
        chunk_rows: number of tokens in a chunk. None: as many as have 1.75 GiB of FP32 logits.

    Returns:
        `LogProbs(logp, entropy)`, both of shape [...], in nats, float32 (float64 if an operand is float64). `entropy`
        has no gradient.

    Raises:
        ValueError: in the same cases as `linear_logprobs`, or `token_loss` returns another shape than [C].
        LossMismatchError: in backward, if the incoming gradient is not one factor times the gradient of `token_loss`.

    Source: the gradient of the objective J (arXiv 2510.13786, section 2) with respect to logp_t depends on rho_t and
    A_t only.
    """
    check_arguments(hidden, weight, labels, temperature, chunk_rows)
    shape = labels.shape
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.expand(shape).reshape(-1).float()
    hidden_NH, weight_VH = promote(hidden.reshape(-1, hidden.shape[-1]), weight)
    logp_N, entropy_N = _SharedPass.apply(
        hidden_NH,
        weight_VH,
        labels.reshape(-1).long().contiguous(),
        1.0 / temperature,
        token_loss,
        chunk_rows or default_chunk_rows(len(weight_VH)),
        torch.is_grad_enabled(),
    )
    return LogProbs(logp_N.view(shape), entropy_N.view(shape))


class _SharedPass(torch.autograd.Function):
    """Gradients up to one factor in forward; the check and the factor in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Any,
        weight_VH: Any,
        labels_N: Any,
        scale: Any,
        token_loss: TokenLoss,
        chunk_rows: int,
        with_backward: bool,
    ) -> Any:
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        logp_N, entropy_N, slope_N = torch.empty(3, len(hidden_NH), dtype=dtype, device=hidden_NH.device)
        need_hidden, need_weight = (needed and with_backward for needed in ctx.needs_input_grad[:2])
        with torch.autocast(hidden_NH.device.type, enabled=False):
            head = HeadProducts(weight_VH)
            gradients = HeadGradients(head, hidden_NH, need_hidden, need_weight)
            for at in chunks(len(hidden_NH), chunk_rows):
                logits_CV, per_token = head.logits(hidden_NH[at]), (labels_N[at], part(scale, at))
                logp_N[at], lse_C, entropy_N[at] = passes(logits_CV).row_statistics(logits_CV, *per_token)
                if not (need_hidden or need_weight):
                    continue
                slope_N[at] = _slope(token_loss, logp_N[at], at)
                rows = active_tokens(slope_N, at=at)
                if not len(slope_N[rows]):
                    continue
                grad_CV = passes(logits_CV).row_gradient(
                    logits_CV, *per_token, lse_C, entropy_N[at], slope_N[at], None, head.grad_dtype
                )
                if isinstance(rows, torch.Tensor):
                    grad_CV = grad_CV[rows - at.start]
                del logits_CV  # a copy of few rows must not hold the memory of all
                gradients.add(grad_CV, rows)
                del grad_CV
        total_VH = gradients.weight_total_VH
        if need_weight and total_VH is None:
            total_VH = torch.zeros(weight_VH.shape, dtype=dtype, device=weight_VH.device)
        ctx.save_for_backward(slope_N, gradients.hidden_grad_NH, total_VH)
        ctx.weight_dtype = weight_VH.dtype
        ctx.mark_non_differentiable(entropy_N)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp_N: Any, _: Any) -> Any:
        slope_N, grad_hidden_NH, total_VH = ctx.saved_tensors
        factor = _common_factor(grad_logp_N, slope_N)
        if grad_hidden_NH is not None:
            grad_hidden_NH = grad_hidden_NH * factor
        grad_weight_VH = None
        if total_VH is not None:
            # One pass: scaled in FP32, rounded on the way out.
            grad_weight_VH = torch.empty(total_VH.shape, dtype=ctx.weight_dtype, device=total_VH.device)
            torch.mul(total_VH, factor, out=grad_weight_VH)
        return grad_hidden_NH, grad_weight_VH, None, None, None, None, None


def _slope(token_loss: TokenLoss, logp_C: torch.Tensor, at: slice) -> torch.Tensor:
    """Return d token_loss / d logp of each token, [C]."""
    with torch.enable_grad():
        logp_C = logp_C.detach().requires_grad_()
        loss_C = token_loss(logp_C, at)
        if loss_C.shape != logp_C.shape:
            raise ValueError(
                f"token_loss returned {list(loss_C.shape)} for log-probabilities {list(logp_C.shape)}; it must return "
                "the loss of each token, without reducing."
            )
        (slope_C,) = torch.autograd.grad(loss_C.sum(), logp_C)
    return slope_C


def _common_factor(grad_logp_N: torch.Tensor, slope_N: torch.Tensor) -> float:
    """Return the number f with grad = f * slope; raise `LossMismatchError` if there is none.

    f is the least-squares one, in float64: no single rounded token decides it.
    """
    if not len(slope_N):
        return 1.0
    grad_N, slope_N = grad_logp_N.double(), slope_N.double()
    factor = (grad_N @ slope_N) / (slope_N @ slope_N).clamp(min=torch.finfo(torch.float64).tiny)
    expected_N = factor * slope_N
    # A token whose slope is all but 0 arrives as a denormal FP32 number, of a few bits: no relative error holds there.
    floor = NEGLIGIBLE * expected_N.abs().max()
    wrong_N = ~((grad_N - expected_N).abs() <= AGREEMENT * expected_N.abs() + floor)  # NaN is wrong
    factor_value, num_wrong, at = torch.stack([factor, wrong_N.sum(), wrong_N.double().argmax()]).tolist()
    if num_wrong:
        raise LossMismatchError(
            f"The shared pass made gradients for one token loss, but {int(num_wrong)} of {len(slope_N)} tokens arrive "
            f"with a gradient that is not {factor_value:.6g} times that loss's: token {int(at)} has "
            f"{grad_N[int(at)].item():.6g}, the token loss gives {slope_N[int(at)].item():.6g}. Use linear_logprobs "
            "(impl_backend=fp32) for this loss, or give the shared pass the token loss that is trained."
        )
    return factor_value
