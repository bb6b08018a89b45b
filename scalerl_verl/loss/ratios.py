# SPDX-License-Identifier: Apache-2.0
"""Importance ratios between trainer and sampler: which tokens have one, and the two ways of bounding what it may do.

Shape legend: B rows (responses), T tokens of the padded response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from scalerl_verl.names import GEOMETRIC_MEAN, PRODUCT
from scalerl_verl.names.keys import is_token_range
from scalerl_verl.names.kinds import is_number

MAX_ABS_LOGP = 1.0e9
"""From this magnitude on, a log-probability is a masked logit (such as `torch.finfo(...).min`), not a probability: a
few such terms would overflow the FP32 sum."""

SEQUENCE_TRUNCATIONS: tuple[str, ...] = (PRODUCT, GEOMETRIC_MEAN)
"""How the ratios of a response's tokens become one ratio of the sequence."""

_MAX_TOKEN_LOG_RATIO = 1.0e30
"""An infinite log-ratio counts as this inside a sequence's sum, which thus is never inf - inf."""


def usable_tokens(logp_train_BT: torch.Tensor, logp_rollout_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return which unmasked tokens have a meaningful ratio, [B, T] bool.

    They do if `logp_train` is finite and of magnitude below `MAX_ABS_LOGP`, and `logp_rollout` is finite, or -inf (a
    token the sampler deemed impossible: its ratio is infinite).
    """
    train_ok_BT = logp_train_BT.abs() < MAX_ABS_LOGP  # False for NaN and +-inf
    rollout_ok_BT = torch.isfinite(logp_rollout_BT) | torch.isneginf(logp_rollout_BT)
    return mask_BT.bool() & train_ok_BT & rollout_ok_BT


def tokens_in_range(log_ratio_BT: torch.Tensor, token_mask_range: Sequence[float] | None) -> torch.Tensor:
    """Return where low <= rho <= high, compared as logarithms, [B, T] bool; everywhere if the range is None.

    Source: IcePop (Ling Team, arXiv 2510.18855): a token outside of [alpha, beta] contributes nothing.
    """
    if token_mask_range is None:
        return torch.ones_like(log_ratio_BT, dtype=torch.bool)
    low, high = token_mask_range
    return (log_ratio_BT >= (math.log(low) if low > 0 else -math.inf)) & (log_ratio_BT <= math.log(high))


def sequence_log_ratio(log_ratio_BT: torch.Tensor, usable_BT: torch.Tensor, how: str) -> torch.Tensor:
    """Return one log-ratio per row over its usable tokens, [B, 1] float64; 0 for a row that has none.

        product          sum_t log rho_it                 the probability ratio of the whole response
        geometric_mean   (1 / |y_i|) sum_t log rho_it     the same, normalised by length

    Args:
        log_ratio_BT: log-ratios per token; what stands where `usable_BT` is False is not read, [B, T] floating.
        usable_BT: tokens that count, [B, T] bool.
        how: one of `SEQUENCE_TRUNCATIONS`.

    Source: "product": sequence-level truncated importance sampling (Seq-TIS), the only one of the two that is unbiased
    but for the truncation (Liu et al. 2025, "When Speed Kills Stability"; `rollout_is: sequence` of verl).
    "geometric_mean": the sequence ratio of GSPO (arXiv 2507.18071).
    """
    log_ratio_BT = log_ratio_BT.masked_fill(~usable_BT, 0.0)
    log_ratio_BT = log_ratio_BT.clamp(min=-_MAX_TOKEN_LOG_RATIO, max=_MAX_TOKEN_LOG_RATIO)
    total_B = log_ratio_BT.sum(dim=-1, keepdim=True, dtype=torch.float64)
    return total_B if how == PRODUCT else total_B / usable_BT.sum(dim=-1, keepdim=True).clamp(min=1)


def loss_dtype(logp_train_BT: torch.Tensor, logp_rollout_BT: torch.Tensor) -> torch.dtype:
    """Return float64 if either input is float64, else float32."""
    return torch.float64 if torch.float64 in (logp_train_BT.dtype, logp_rollout_BT.dtype) else torch.float32


def check_options(eps_max: object, token_mask_range: object, sequence_truncation: object) -> None:
    """Raise ValueError for a cap, a range or a truncation that means nothing."""
    if not is_number(eps_max) or not 0 < eps_max < math.inf:  # type: ignore[operator]
        raise ValueError(f"eps_max is {eps_max!r}; a finite number > 0 is allowed. Set it to the cap, such as 5.0.")
    if token_mask_range is not None and not is_token_range(token_mask_range):
        raise ValueError(
            f"token_mask_range is {token_mask_range!r}; two finite numbers [low, high] with 0 <= low < 1 < high are "
            f"allowed: the ratio of a token that both policies agree on is 1. Set such a range, or None."
        )
    if sequence_truncation is not None and sequence_truncation not in SEQUENCE_TRUNCATIONS:
        raise ValueError(
            f"sequence_truncation is {sequence_truncation!r}; allowed are {', '.join(SEQUENCE_TRUNCATIONS)} and None. "
            f"Set one of these."
        )
