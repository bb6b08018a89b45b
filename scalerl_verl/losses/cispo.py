# SPDX-License-Identifier: Apache-2.0
"""CISPO, the truncated importance-sampling policy loss of ScaleRL (arXiv 2510.13786, section 2).

Shape legend: B rows (responses), T tokens of the padded response, N selected tokens.

Which tokens contribute. A position whose mask is False never does, whatever it holds. An unmasked token is *usable* if

* `logp_train` is finite and of magnitude below `MAX_ABS_LOGP`, and
* `logp_rollout` is finite, or -inf (a token the sampler deemed impossible: its ratio is infinite, hence capped).

Any other unmasked token (`logp_train` NaN, +-inf or huge; `logp_rollout` NaN or +inf) has no meaningful ratio.
It gives 0 loss and 0 gradient and is counted in `scalerl/loss/nonfinite_tokens_sum`: one broken token does not spoil a
step, and does not go unseen. A non-finite advantage at a usable token is let through: it is a fault of the estimator,
not of a sampler, and must not be hidden.
"""

from __future__ import annotations

import math

import torch

MAX_ABS_LOGP = 1.0e9
"""From this magnitude on, a log-probability is a masked logit (such as `torch.finfo(...).min`), not a probability: a
few such terms would overflow the FP32 sum."""

_MAX_LOG_RATIO = 80.0
"""Metrics see log-ratios clamped to this from above: exp(80) = 5.5e34, whose sums over a batch stay finite."""

_NEUTRAL_METRICS: dict[str, tuple[float, str]] = {
    "scalerl/loss/ratio_mean": (1.0, "mean"),
    "scalerl/loss/ratio_max": (1.0, "max"),
    "scalerl/loss/ratio_min": (1.0, "min"),
    "scalerl/loss/capped_frac_pos": (0.0, "mean"),
    "scalerl/loss/capped_frac_neg": (0.0, "mean"),
    "scalerl/loss/ess_frac": (1.0, "mean"),
    "scalerl/loss/nonfinite_tokens_sum": (0.0, "sum"),
    "scalerl/mismatch/log_ratio_abs_mean": (0.0, "mean"),
    "scalerl/mismatch/log_ratio_abs_max": (0.0, "max"),
    "scalerl/mismatch/k3_kl": (0.0, "mean"),
}


def cispo_token_loss(
    logp_train_BT: torch.Tensor,
    logp_rollout_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    eps_max: float = 5.0,
) -> torch.Tensor:
    """Return the CISPO loss of every token, with the importance ratio truncated at one absolute cap.

        loss = -sg(min(rho, eps_max)) * A * logp_train,    rho = exp(logp_train - logp_rollout)

    There is no lower clip, and `eps_max` is the cap itself (5 means 5, not 1 + 5). The log-ratio is clamped at
    log(eps_max) before exp, so nothing overflows. The gradient is -min(rho, eps_max) * A with respect to `logp_train`.
    The module's docstring says which tokens contribute; all others get exactly 0 loss and 0 gradient.

    Args:
        logp_train_BT: log-probabilities under the policy being trained, at the sampling temperature, [B, T], float32,
            bfloat16 or float64.
        logp_rollout_BT: log-probabilities recorded when each token was sampled, [B, T], same dtypes.
        advantages_BT: advantages, with the weights of their rows if any, [B, T], same dtypes.
        mask_BT: True (or non-zero) where a token trains, [B, T].
        eps_max: cap of the ratio. The paper finds 4, 5 and 8 alike. A cap above the square root of the largest number
            of the loss's dtype (1.8e19 in FP32) acts as that root.

    Returns:
        Loss per token to minimise, [B, T], float32, or float64 if either log-probability is float64.

    Raises:
        ValueError: if `eps_max` is not a finite number above 0, shapes differ, or an input is float16 or not floating.

    Source: arXiv 2510.13786, objective J of section 2 (ScaleRL), the summand per token.
    """
    _check_inputs(logp_train_BT, logp_rollout_BT, advantages_BT, mask_BT, eps_max)
    dtype = _loss_dtype(logp_train_BT, logp_rollout_BT)
    logp_train_BT = logp_train_BT.to(dtype)
    logp_rollout_BT = logp_rollout_BT.detach().to(dtype)
    usable_BT = _usable_tokens(logp_train_BT.detach(), logp_rollout_BT, mask_BT)

    # Every operand is selected before it enters the arithmetic: 0 * NaN is NaN, in the loss and in its gradient.
    logp_train_BT = logp_train_BT.masked_fill(~usable_BT, 0.0)
    logp_rollout_BT = logp_rollout_BT.masked_fill(~usable_BT, 0.0)
    advantages_BT = advantages_BT.detach().to(dtype).masked_fill(~usable_BT, 0.0)

    cap = min(float(eps_max), math.sqrt(torch.finfo(dtype).max))
    log_ratio_BT = (logp_train_BT.detach() - logp_rollout_BT).clamp(max=math.log(cap))
    ratio_BT = log_ratio_BT.exp().clamp(max=cap)
    return -(ratio_BT * advantages_BT) * logp_train_BT


@torch.no_grad()
def cispo_metrics(
    logp_train_BT: torch.Tensor,
    logp_rollout_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    eps_max: float = 5.0,
) -> dict[str, tuple[float, str]]:
    """Return diagnostics of the ratio and of the trainer-generator mismatch, each with how to aggregate it.

        ess_frac = (sum w)^2 / (n * sum w^2),  w = min(rho, eps_max)
        k3_kl = mean(rho - 1 - log rho), an estimate of KL(rollout || train) over tokens of the rollout

    Ratios are not truncated except in `ess_frac`; log-ratios are clamped to 80 from above, so every value is finite.
    Unusable tokens (see the module) enter `nonfinite_tokens_sum` only. Keys never vary. Where no token is usable, the
    values are those of a ratio of 1 everywhere. A "mean" is over this call's tokens: over several micro-batches it is
    recombined with equal weight per micro-batch.

    Args:
        logp_train_BT: log-probabilities under the policy being trained, [B, T], float32, bfloat16 or float64.
        logp_rollout_BT: log-probabilities recorded when each token was sampled, [B, T], same dtypes.
        advantages_BT: advantages; only their sign is used, [B, T], same dtypes.
        mask_BT: True (or non-zero) where a token trains, [B, T].
        eps_max: cap of the ratio.

    Returns:
        Name to (value, aggregation); aggregation is "sum", "max", "min" or "mean". `capped_frac_pos` is the fraction
        of the tokens with A > 0 whose ratio exceeds `eps_max`, `capped_frac_neg` that of the tokens with A < 0.

    Raises:
        ValueError: as `cispo_token_loss`.

    Source: arXiv 2510.13786, section 2; k3 is the estimator of http://joschu.net/blog/kl-approx.html.
    """
    _check_inputs(logp_train_BT, logp_rollout_BT, advantages_BT, mask_BT, eps_max)
    dtype = _loss_dtype(logp_train_BT, logp_rollout_BT)
    usable_BT = _usable_tokens(logp_train_BT.to(dtype), logp_rollout_BT.to(dtype), mask_BT)
    num_nonfinite = (mask_BT.bool() & ~usable_BT).sum().double()
    logp_train_N = logp_train_BT[usable_BT].double()
    num_tokens = logp_train_N.numel()
    metrics = dict(_NEUTRAL_METRICS)
    if num_tokens == 0:
        metrics["scalerl/loss/nonfinite_tokens_sum"] = (float(num_nonfinite), "sum")
        return metrics

    log_ratio_N = (logp_train_N - logp_rollout_BT[usable_BT].double()).clamp(max=_MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    advantages_N = advantages_BT[usable_BT]
    capped_N = log_ratio_N > math.log(eps_max)
    weight_N = ratio_N.clamp(max=float(eps_max))
    # If all ratios underflowed to 0, nothing is left of the sample: that is 0, not 0 / 0.
    tiny = torch.finfo(torch.float64).tiny
    ess_frac = weight_N.sum().square() / (num_tokens * weight_N.square().sum()).clamp(min=tiny)
    values = {
        "scalerl/loss/ratio_mean": ratio_N.mean(),
        "scalerl/loss/ratio_max": ratio_N.max(),
        "scalerl/loss/ratio_min": ratio_N.min(),
        "scalerl/loss/capped_frac_pos": _fraction(capped_N, advantages_N > 0),
        "scalerl/loss/capped_frac_neg": _fraction(capped_N, advantages_N < 0),
        "scalerl/loss/ess_frac": ess_frac,
        "scalerl/loss/nonfinite_tokens_sum": num_nonfinite,
        "scalerl/mismatch/log_ratio_abs_mean": log_ratio_N.abs().mean(),
        "scalerl/mismatch/log_ratio_abs_max": log_ratio_N.abs().max(),
        # expm1 keeps the digits that exp(x) - 1 - x loses near 0, where a healthy run lives.
        "scalerl/mismatch/k3_kl": (torch.expm1(log_ratio_N) - log_ratio_N).mean(),
    }
    # One transfer to the host, not one per value.
    for name, value in zip(values, torch.stack(list(values.values())).tolist(), strict=True):
        metrics[name] = (value, _NEUTRAL_METRICS[name][1])
    return metrics


def _fraction(hit_N: torch.Tensor, among_N: torch.Tensor) -> torch.Tensor:
    """Return the fraction of hits among the selected tokens, 0 if none is selected."""
    return (hit_N & among_N).sum().double() / among_N.sum().double().clamp(min=1.0)


def _usable_tokens(logp_train_BT: torch.Tensor, logp_rollout_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return which tokens contribute, [B, T] bool; the rule is in the module's docstring."""
    train_ok_BT = logp_train_BT.abs() < MAX_ABS_LOGP  # False for NaN and +-inf
    rollout_ok_BT = torch.isfinite(logp_rollout_BT) | torch.isneginf(logp_rollout_BT)
    return mask_BT.bool() & train_ok_BT & rollout_ok_BT


def _loss_dtype(logp_train_BT: torch.Tensor, logp_rollout_BT: torch.Tensor) -> torch.dtype:
    """Return float64 if either input is float64, else float32."""
    return torch.float64 if torch.float64 in (logp_train_BT.dtype, logp_rollout_BT.dtype) else torch.float32


def _check_inputs(
    logp_train_BT: torch.Tensor,
    logp_rollout_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    eps_max: float,
) -> None:
    """Raise ValueError for a wrong cap, differing shapes or dtypes that cannot hold a ratio."""
    if isinstance(eps_max, bool) or not isinstance(eps_max, int | float) or not 0 < eps_max < math.inf:
        raise ValueError(f"eps_max is {eps_max!r}; a finite number > 0 is allowed. Set it to the cap, such as 5.0.")
    tensors = {
        "logp_train_BT": logp_train_BT,
        "logp_rollout_BT": logp_rollout_BT,
        "advantages_BT": advantages_BT,
        "mask_BT": mask_BT,
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if logp_train_BT.dim() != 2 or len(set(shapes.values())) != 1:
        raise ValueError(f"Shapes are {shapes}; all must be the same [B, T]. Pad or expand the inputs before the call.")
    for name in ("logp_train_BT", "logp_rollout_BT", "advantages_BT"):
        dtype = tensors[name].dtype
        if dtype == torch.float16 or not dtype.is_floating_point:
            raise ValueError(
                f"{name} has dtype {dtype}; float32, bfloat16 and float64 are allowed. float16 rounds the ratio "
                f"and overflows above 65504: compute log-probabilities in float32."
            )
