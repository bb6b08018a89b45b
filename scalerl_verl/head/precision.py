# SPDX-License-Identifier: Apache-2.0
"""How far a head's logits are from float64, and how far that may be for a head that claims FP32.

Shape legend: N tokens, H hidden size, C columns (token ids).
"""

from __future__ import annotations

import torch

MAX_RELATIVE_ERROR = 2e-5
"""Largest relative error of FP32 logits. FP32 sums give 1e-7 to 1e-5 up to H = 16k, whatever the order of summation;
TF32 operands give 3e-4, logits rounded to bf16 1.7e-3, to float16 2e-4."""

PROBE_TOKENS = 8
"""Hidden states in a probe: enough for a root mean square over their logits."""

PROBE_COLUMNS = 1024
"""Columns of the vocabulary that a probe compares, evenly spaced: float64 of a whole weight would need gigabytes."""


def probe_hidden_states(hidden_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the same normal hidden states in every process, [`PROBE_TOKENS`, `hidden_size`] of `dtype`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(PROBE_TOKENS, hidden_size, generator=generator).to(device, dtype)


def probe_columns(num_columns: int) -> torch.Tensor:
    """Return up to `PROBE_COLUMNS` evenly spaced column indices, the first and the last among them, [C] int64."""
    return torch.linspace(0, num_columns - 1, min(num_columns, PROBE_COLUMNS)).round().long().unique()


def float64_logits(
    hidden_NH: torch.Tensor,
    weight_CH: torch.Tensor,
    bias_C: torch.Tensor | None = None,
    soft_cap: float | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Return logits of the same operands in float64, [N, C]: scale * soft_cap * tanh(hidden weight^T / soft_cap)."""
    logits_NC = hidden_NH.double() @ weight_CH.double().t()
    if bias_C is not None:
        logits_NC = logits_NC + bias_C.double()
    if soft_cap is not None:
        logits_NC = torch.tanh(logits_NC / soft_cap) * soft_cap
    return logits_NC * scale


def logit_errors(logits_NC: torch.Tensor, reference_NC: torch.Tensor) -> dict[str, float]:
    """Return how far logits are from their float64 reference.

    Args:
        logits_NC: [N, C] floating.
        reference_NC: [N, C] float64.

    Returns:
        ``max_abs_error``: largest difference; ``relative_error``: root mean square of the differences over that of the
        reference, 0 if both are 0. NaN stays NaN.
    """
    difference_NC = logits_NC.double() - reference_NC
    norm = difference_NC.norm()
    relative = norm / reference_NC.norm() if norm != 0 else norm
    return {"max_abs_error": difference_NC.abs().max().item(), "relative_error": relative.item()}
