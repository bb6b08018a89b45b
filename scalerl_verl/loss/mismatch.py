# SPDX-License-Identifier: Apache-2.0
"""How far apart the log-probs of trainer and generator are, for any policy loss.

Shape legend: B rows (responses), T tokens of the padded response, N selected tokens.
"""

from __future__ import annotations

import math

import torch

from scalerl_verl.loss.ratios import loss_dtype, sequence_log_ratio, usable_tokens
from scalerl_verl.names import DEFAULT_EPS_MAX, PRODUCT

MAX_LOG_RATIO = 80.0
"""Metrics see log-ratios clamped to this from above: exp(80) = 5.5e34, whose sums over a batch stay finite."""

NEUTRAL_MISMATCH: dict[str, tuple[float, str]] = {
    "scalerl/mismatch/log_ratio_abs_mean": (0.0, "mean"),
    "scalerl/mismatch/log_ratio_abs_max": (0.0, "max"),
    "scalerl/mismatch/sequence_log_ratio_abs_max": (0.0, "max"),
    "scalerl/mismatch/k3_kl": (0.0, "mean"),
    "scalerl/mismatch/ess_frac": (1.0, "mean"),
    "scalerl/mismatch/above_cap_frac": (0.0, "mean"),
}
"""Name -> (value where no token is usable, how micro-batches and ranks combine it)."""


def mismatch_values(
    log_ratio_BT: torch.Tensor, usable_BT: torch.Tensor, log_ratio_N: torch.Tensor, eps_max: float
) -> dict[str, torch.Tensor]:
    """Return the metrics of `mismatch_metrics` as scalar tensors, from log-ratios that are already computed.

    Args:
        log_ratio_BT: 0 where not usable, [B, T] float64.
        usable_BT: [B, T] bool, at least one True.
        log_ratio_N: those of the usable tokens, clamped to `MAX_LOG_RATIO` from above, [N] float64.
        eps_max: cap of the ratio.
    """
    weight_N = log_ratio_N.clamp(max=math.log(eps_max)).exp()
    return {
        "scalerl/mismatch/log_ratio_abs_mean": log_ratio_N.abs().mean(),
        "scalerl/mismatch/log_ratio_abs_max": log_ratio_N.abs().max(),
        "scalerl/mismatch/sequence_log_ratio_abs_max": sequence_log_ratio(log_ratio_BT, usable_BT, PRODUCT).abs().max(),
        # expm1 keeps the digits that exp(x) - 1 - x loses near 0, where a healthy run lives.
        "scalerl/mismatch/k3_kl": (torch.expm1(log_ratio_N) - log_ratio_N).mean(),
        "scalerl/mismatch/ess_frac": effective_fraction(weight_N),
        "scalerl/mismatch/above_cap_frac": (log_ratio_N > math.log(eps_max)).double().mean(),
    }


def effective_fraction(weight_N: torch.Tensor) -> torch.Tensor:
    """Return the effective sample size as a fraction, (sum w)^2 / (n sum w^2); 0 if all weights are 0."""
    tiny = torch.finfo(torch.float64).tiny
    return weight_N.sum().square() / (len(weight_N) * weight_N.square().sum()).clamp(min=tiny)


@torch.no_grad()
def mismatch_metrics(
    logp_train_BT: torch.Tensor, logp_rollout_BT: torch.Tensor, mask_BT: torch.Tensor, eps_max: float = DEFAULT_EPS_MAX
) -> dict[str, tuple[float, str]]:
    """Return diagnostics of the ratio rho = exp(logp_train - logp_rollout), each with how to aggregate it.

        log_ratio_abs_mean, log_ratio_abs_max    mean and maximum of |log rho| over tokens
        sequence_log_ratio_abs_max               max_i |sum_t log rho_it|
        k3_kl                                    mean(rho - 1 - log rho), an estimate of KL(rollout || train)
        ess_frac                                 (sum w)^2 / (n * sum w^2),  w = min(rho, eps_max)
        above_cap_frac                           fraction of tokens with rho > eps_max

    Logarithms are natural. Log-ratios per token above 80 count as 80. Unmasked tokens that are
    not usable (see `cispo_token_loss`) are left out. If no token is usable, the values are those of a ratio of 1.

    Args:
        logp_train_BT: log-probabilities under the policy being trained, [B, T], float32, bfloat16 or float64.
        logp_rollout_BT: log-probabilities recorded when each token was sampled, [B, T], same dtypes.
        mask_BT: True (or non-zero) where a token counts, [B, T].
        eps_max: cap of the ratio, > 0; only `ess_frac` and `above_cap_frac` depend on it.

    Returns:
        `scalerl/mismatch/NAME` -> (value, aggregation); aggregation is "max" or "mean".

    Source: arXiv 2510.13786, section 2; k3 is the estimator of http://joschu.net/blog/kl-approx.html.
    """
    dtype = loss_dtype(logp_train_BT, logp_rollout_BT)
    usable_BT = usable_tokens(logp_train_BT.to(dtype), logp_rollout_BT.to(dtype), mask_BT)
    if not usable_BT.any():
        return dict(NEUTRAL_MISMATCH)
    log_ratio_BT = (logp_train_BT.double() - logp_rollout_BT.double()).masked_fill(~usable_BT, 0.0)
    log_ratio_N = log_ratio_BT[usable_BT].clamp(max=MAX_LOG_RATIO)
    values = mismatch_values(log_ratio_BT, usable_BT, log_ratio_N, eps_max)
    numbers = torch.stack(list(values.values())).tolist()
    return {name: (number, NEUTRAL_MISMATCH[name][1]) for name, number in zip(values, numbers, strict=True)}
