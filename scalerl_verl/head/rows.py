# SPDX-License-Identifier: Apache-2.0
"""The passes over a chunk of logits, in plain PyTorch: the statistics of each row, and its gradient.

A label outside [0, V) belongs to another shard of the vocabulary, or to none: its log-probability is NaN, and it has no
part in the gradient.

Shape legend: N rows of the chunk, V columns. `scale` is 1 / temperature, a number or [N].
"""

from __future__ import annotations

from typing import TypeAlias

import torch

Scale: TypeAlias = "float | torch.Tensor"


def row_statistics(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, scale: Scale
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logp, log-sum-exp, entropy) of each row of scaled logits, [N] each, in the dtype of the logits."""
    logits_NV = logits_NV * column(scale)
    lse_N = torch.logsumexp(logits_NV, dim=-1)
    inside_N, at_N = _columns(labels_N, logits_NV.shape[1])
    logp_N = torch.where(inside_N, logits_NV.gather(1, at_N[:, None])[:, 0] - lse_N, torch.nan)
    # Centred by lse, the sum has terms p log p >= -1/e each; sum(p x) and lse apart would cancel digits.
    log_probs_NV = logits_NV - lse_N[:, None]
    probs_NV = log_probs_NV.exp()
    entropy_N = -(probs_NV * torch.where(probs_NV > 0, log_probs_NV, 0)).sum(dim=-1)
    return logp_N, lse_N, entropy_N


def row_gradient(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    scale: Scale,
    lse_N: torch.Tensor,
    entropy_N: torch.Tensor,
    grad_logp_N: torch.Tensor | None,
    grad_entropy_N: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return d loss / d (unscaled logits), [N, V] in `out_dtype`; the logits may be overwritten.

    d_j = scale * (g_logp (1[j = y] - p_j) - g_entropy p_j (log p_j + entropy))
    """
    log_probs_NV = (logits_NV * column(scale)).sub_(lse_N[:, None])
    probs_NV = log_probs_NV.exp()
    grad_NV = torch.zeros_like(probs_NV)
    if grad_logp_N is not None:
        inside_N, at_N = _columns(labels_N, grad_NV.shape[1])
        grad_NV -= grad_logp_N[:, None] * probs_NV
        grad_NV.scatter_add_(1, at_N[:, None], torch.where(inside_N, grad_logp_N, 0.0)[:, None].to(grad_NV.dtype))
    if grad_entropy_N is not None:
        surprise_NV = torch.where(probs_NV > 0, log_probs_NV, 0) + entropy_N[:, None]
        grad_NV -= grad_entropy_N[:, None] * probs_NV * surprise_NV
    return (grad_NV * column(scale)).to(out_dtype)


def _columns(labels_N: torch.Tensor, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which labels are columns here, and for each a column that exists, [N] each."""
    return (labels_N >= 0) & (labels_N < num_columns), labels_N.clamp(0, num_columns - 1)


def column(scale: Scale) -> Scale:
    """Return a per-row scale as a column; a number as it is."""
    return scale[:, None] if isinstance(scale, torch.Tensor) else scale
