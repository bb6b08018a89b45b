# SPDX-License-Identifier: Apache-2.0
"""FP32 logits as such, for callers that need them all: the head without fusion.

Shape legend: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from scalerl_verl.head.chunked import HeadProducts, promote


def fp32_logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return hidden weight^T (+ bias) in FP32, differentiable, the storage of all operands untouched.

    Sums are FP32 as in `linear_logprobs`; autocast has no effect. In backward the gradient of the logits is rounded to
    the operands' dtype before its two products (as any linear layer's is); the products accumulate in FP32.

    Args:
        hidden: [..., H] floating.
        weight: [V, H] floating.
        bias: [V] floating, or None.

    Returns:
        Logits, [..., V], float32 (float64 for float64 operands).
    """
    hidden_NH, weight_VH = promote(hidden.reshape(-1, hidden.shape[-1]), weight)
    logits = _Fp32Logits.apply(hidden_NH, weight_VH, (*hidden.shape[:-1], len(weight)))
    return logits if bias is None else logits + bias.to(logits.dtype)


class _Fp32Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: Any, weight_VH: Any, shape: tuple[int, ...]) -> Any:
        ctx.save_for_backward(hidden_NH, weight_VH)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            # Detached, the result is no view: FSDP2 hangs a hook on what its units return, which a view could lose.
            return HeadProducts(weight_VH).logits(hidden_NH).view(shape).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        hidden_NH, weight_VH = ctx.saved_tensors
        need_hidden, need_weight, _ = ctx.needs_input_grad
        grad_hidden_NH = grad_weight_VH = None
        with torch.autocast(hidden_NH.device.type, enabled=False):
            head = HeadProducts(weight_VH)
            grad_NV = grad.reshape(len(hidden_NH), len(weight_VH)).to(head.grad_dtype)
            if need_hidden:
                grad_hidden_NH = torch.empty_like(hidden_NH)
                head.hidden_gradient(grad_NV, grad_hidden_NH)
            if need_weight:
                grad_weight_VH = head.add_weight_gradient(None, grad_NV, hidden_NH).to(weight_VH.dtype)
        return grad_hidden_NH, grad_weight_VH, None
