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

Two options, off by default and free to combine, bound the ratio in other ways than by its cap:

* `token_mask_range` [low, high] (IcePop, arXiv 2510.18855): a usable token whose own ratio lies outside gets 0 loss and
  0 gradient, whatever its sequence does, and is counted in `scalerl/loss/out_of_range_tokens_sum`. It stays in the
  denominators, as in IcePop and in INTELLECT-3 (arXiv 2512.16144): |y| counts what was sampled.
* `sequence_truncation`: all tokens of a response share the weight min(rho_i, eps_max) of one sequence ratio, over all
  its usable tokens. "product" is what the field calls sequence-level truncated importance sampling (Seq-TIS):
  rho_i = prod_t rho_it. Its log-variance grows with the length, so that over thousands of tokens most responses end
  at the cap or near 0. "geometric_mean" is GSPO's length-normalised ratio rho_i = (prod_t rho_it)^(1/|y_i|), stable but
  biased. A response never spans micro-batches, so neither depends on how a batch is split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from scalerl_verl.loss.mismatch import MAX_LOG_RATIO, NEUTRAL_MISMATCH, effective_fraction, mismatch_values
from scalerl_verl.loss.policy_loss import PolicyLoss
from scalerl_verl.loss.ratios import (
    check_options,
    loss_dtype,
    sequence_log_ratio,
    tokens_in_range,
    usable_tokens,
)
from scalerl_verl.names import DEFAULT_EPS_MAX

_NEUTRAL_METRICS: dict[str, tuple[float, str]] = {
    "scalerl/loss/ratio_mean": (1.0, "mean"),
    "scalerl/loss/ratio_max": (1.0, "max"),
    "scalerl/loss/ratio_min": (1.0, "min"),
    "scalerl/loss/capped_frac_pos": (0.0, "mean"),
    "scalerl/loss/capped_frac_neg": (0.0, "mean"),
    "scalerl/loss/ess_frac": (1.0, "mean"),
    "scalerl/loss/out_of_range_frac": (0.0, "mean"),
    "scalerl/loss/out_of_range_tokens_sum": (0.0, "sum"),
    "scalerl/loss/nonfinite_tokens_sum": (0.0, "sum"),
    **NEUTRAL_MISMATCH,
}


def cispo_token_loss(
    logp_train_BT: torch.Tensor,
    logp_rollout_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    eps_max: float = DEFAULT_EPS_MAX,
    token_mask_range: Sequence[float] | None = None,
    sequence_truncation: str | None = None,
) -> torch.Tensor:
    """Return the CISPO loss of every token, with the importance ratio truncated at one absolute cap.

        loss = -sg(min(rho, eps_max)) * A * logp_train,    rho = exp(logp_train - logp_rollout)

    `sg` is stop-gradient: the gradient with respect to `logp_train` is -min(rho, eps_max) * A. There is no lower clip,
    and `eps_max` is the cap itself (5 means 5, not 1 + 5). The log-ratio is clamped at log(eps_max) before exp, so
    nothing overflows.

    A token is usable if its mask is True, `logp_train` is finite and of magnitude below 1e9, and `logp_rollout` is
    finite or -inf (then the ratio is infinite, so it is capped). Every other token gets exactly 0 loss and 0 gradient.

    Args:
        logp_train_BT: log-probabilities under the policy being trained, at the sampling temperature, [B, T], float32,
            bfloat16 or float64.
        logp_rollout_BT: log-probabilities recorded when each token was sampled, [B, T], same dtypes.
        advantages_BT: advantages, already multiplied by the row weights if there are any, [B, T], same dtypes.
        mask_BT: True (or non-zero) where a token trains, [B, T].
        eps_max: cap of the ratio. The paper finds that 4, 5 and 8 work equally well. A cap above the square root of
            the largest number of the loss's dtype (1.8e19 in FP32) is lowered to that root.
        token_mask_range: [low, high] with 0 <= low < 1 < high; tokens whose ratio lies outside contribute nothing
            (IcePop). None: no token is left out.
        sequence_truncation: "product" or "geometric_mean": rho is one ratio per sequence, the product or the geometric
            mean of the ratios of its tokens. None: one ratio per token.

    Returns:
        Loss per token, to be minimised, [B, T], float32, or float64 if either log-probability is float64.

    Raises:
        ValueError: an option has a value that is not allowed, shapes differ, or an input is float16 or not a
            floating-point tensor.

    Source: arXiv 2510.13786, objective J of section 2 (ScaleRL), the summand per token.
    """
    check_options(eps_max, token_mask_range, sequence_truncation)
    _check_tensors(logp_train_BT, logp_rollout_BT, advantages_BT, mask_BT)
    dtype = loss_dtype(logp_train_BT, logp_rollout_BT)
    logp_train_BT = logp_train_BT.to(dtype)
    logp_rollout_BT = logp_rollout_BT.detach().to(dtype)
    usable_BT = usable_tokens(logp_train_BT.detach(), logp_rollout_BT, mask_BT)

    # Every operand is selected before it enters the arithmetic: 0 * NaN is NaN, in the loss and in its gradient.
    log_ratio_BT = (logp_train_BT.detach() - logp_rollout_BT).masked_fill(~usable_BT, 0.0)
    kept_BT = usable_BT
    if token_mask_range is not None:
        kept_BT = usable_BT & tokens_in_range(log_ratio_BT, token_mask_range)
    if sequence_truncation is not None:
        log_ratio_BT = sequence_log_ratio(log_ratio_BT, usable_BT, sequence_truncation).to(dtype)
    logp_train_BT = logp_train_BT.masked_fill(~kept_BT, 0.0)
    advantages_BT = advantages_BT.detach().to(dtype).masked_fill(~kept_BT, 0.0)

    cap = min(float(eps_max), math.sqrt(torch.finfo(dtype).max))
    weight_BT = log_ratio_BT.clamp(max=math.log(cap)).exp().clamp(max=cap)
    return -(weight_BT * advantages_BT) * logp_train_BT


@torch.no_grad()
def cispo_metrics(
    logp_train_BT: torch.Tensor,
    logp_rollout_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    eps_max: float = DEFAULT_EPS_MAX,
    token_mask_range: Sequence[float] | None = None,
    sequence_truncation: str | None = None,
) -> dict[str, tuple[float, str]]:
    """Return diagnostics of the ratio and of the trainer-generator mismatch, each with how to aggregate it.

        ess_frac = (sum w)^2 / (n * sum w^2)      effective sample size, as a fraction of the n tokens
        w = min(rho, eps_max), the weight of a token in the loss; 0 if its ratio is outside `token_mask_range`

    The metrics under `scalerl/mismatch/` are those of `mismatch_metrics`: they are the same for every loss and do not
    depend on the options. `ratio_mean`, `ratio_max` and `ratio_min` are of the ratios per token, which are not
    truncated; log-ratios above 80 count as 80, so every value is finite.

    An unmasked token that is not usable (see `cispo_token_loss`) is counted in `nonfinite_tokens_sum` and in no other
    metric. The keys are always the same. If no token is usable, the values are those of a ratio of 1 everywhere.
    A "mean" is over the tokens of this call: to combine micro-batches, weight each mean by its number of tokens.

    Args:
        logp_train_BT: log-probabilities under the policy being trained, [B, T], float32, bfloat16 or float64.
        logp_rollout_BT: log-probabilities recorded when each token was sampled, [B, T], same dtypes.
        advantages_BT: advantages; only their sign is used, [B, T], same dtypes.
        mask_BT: True (or non-zero) where a token trains, [B, T].
        eps_max: cap of the ratio.
        token_mask_range: as in `cispo_token_loss`.
        sequence_truncation: as in `cispo_token_loss`.

    Returns:
        Name -> (value, aggregation); aggregation is "sum", "max", "min" or "mean". `capped_frac_pos` is the fraction of
        the tokens with A > 0 whose ratio rho is above `eps_max`; `capped_frac_neg` is the same for A < 0. A token that
        `token_mask_range` leaves out is not capped: `out_of_range_tokens_sum` and `out_of_range_frac` count it.

    Raises:
        ValueError: in the same cases as `cispo_token_loss`.

    Source: arXiv 2510.13786, section 2.
    """
    check_options(eps_max, token_mask_range, sequence_truncation)
    _check_tensors(logp_train_BT, logp_rollout_BT, advantages_BT, mask_BT)
    dtype = loss_dtype(logp_train_BT, logp_rollout_BT)
    usable_BT = usable_tokens(logp_train_BT.to(dtype), logp_rollout_BT.to(dtype), mask_BT)
    num_nonfinite = (mask_BT.bool() & ~usable_BT).sum().double()
    num_tokens = int(usable_BT.sum())
    metrics = dict(_NEUTRAL_METRICS)
    if num_tokens == 0:
        metrics["scalerl/loss/nonfinite_tokens_sum"] = (float(num_nonfinite), "sum")
        return metrics

    log_ratio_BT = (logp_train_BT.double() - logp_rollout_BT.double()).masked_fill(~usable_BT, 0.0)
    log_ratio_N = log_ratio_BT[usable_BT].clamp(max=MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    in_range_N = tokens_in_range(log_ratio_BT, token_mask_range)[usable_BT]
    log_weight_N = log_ratio_N
    if sequence_truncation is not None:
        sequence_BT = sequence_log_ratio(log_ratio_BT, usable_BT, sequence_truncation).expand_as(log_ratio_BT)
        log_weight_N = sequence_BT[usable_BT].clamp(max=MAX_LOG_RATIO)
    advantages_N = advantages_BT[usable_BT]
    capped_N = (log_weight_N > math.log(eps_max)) & in_range_N
    weight_N = log_weight_N.exp().clamp(max=float(eps_max)) * in_range_N
    num_out = (~in_range_N).sum().double()
    values = {
        "scalerl/loss/ratio_mean": ratio_N.mean(),
        "scalerl/loss/ratio_max": ratio_N.max(),
        "scalerl/loss/ratio_min": ratio_N.min(),
        "scalerl/loss/capped_frac_pos": _fraction(capped_N, advantages_N > 0),
        "scalerl/loss/capped_frac_neg": _fraction(capped_N, advantages_N < 0),
        "scalerl/loss/ess_frac": effective_fraction(weight_N),
        "scalerl/loss/out_of_range_frac": num_out / num_tokens,
        "scalerl/loss/out_of_range_tokens_sum": num_out,
        "scalerl/loss/nonfinite_tokens_sum": num_nonfinite,
        **mismatch_values(log_ratio_BT, usable_BT, log_ratio_N, eps_max),
    }
    # One transfer to the host, not one per value.
    for name, value in zip(values, torch.stack(list(values.values())).tolist(), strict=True):
        metrics[name] = (value, _NEUTRAL_METRICS[name][1])
    return metrics


LOSS = PolicyLoss(cispo_token_loss, cispo_metrics, ("eps_max", "token_mask_range", "sequence_truncation"))


def _fraction(hit_N: torch.Tensor, among_N: torch.Tensor) -> torch.Tensor:
    """Return the fraction of hits among the selected tokens, 0 if none is selected."""
    return (hit_N & among_N).sum().double() / among_N.sum().double().clamp(min=1.0)


def _check_tensors(
    logp_train_BT: torch.Tensor, logp_rollout_BT: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor
) -> None:
    """Raise ValueError for differing shapes or dtypes that cannot hold a ratio."""
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
