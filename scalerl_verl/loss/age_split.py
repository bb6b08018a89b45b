# SPDX-License-Identifier: Apache-2.0
"""The log-ratio of trainer and generator by the age of the tokens: what the two engines explain, and what age adds.

A token that was sampled under the very weights that score it has a log-ratio that only the engines can explain. An
older one has that, and what changed in the weights since. The split is of the mean square, which adds up where both
parts are uncorrelated:

    mean square of all tokens = mean square of the engines + what age explains

The engines' part is that of whole *responses* of age 0. A token of age 0 in a response that older weights began is left
out of it: with `kv_on_update=keep` the generator computed it on keys and values of the older weights.

Sums and counts are what travels, never means, so the result does not depend on micro-batches and ranks.

Shape legend: B rows (responses), T tokens of the padded response, R runs of one version in a response, G groups of
tokens: 0 the engines', 1 + a other tokens of age a.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from scalerl_verl.loss.mismatch import MAX_LOG_RATIO
from scalerl_verl.loss.ratios import usable_tokens
from scalerl_verl.loss.token_means import WEIGHT

PREFIX = "scalerl/mismatch"
SQUARE_OF_ALL, SQUARE_OF_ENGINES = f"{PREFIX}/log_ratio_square_mean", f"{PREFIX}/engines/log_ratio_square_mean"
EXPLAINED_BY_AGE = f"{PREFIX}/explained_by_age_frac"

Runs = Sequence[Sequence[int]]
"""(version, sampled tokens) of a response, in the order of sampling."""


@torch.no_grad()
def sum_by_age(
    logp_train_BT: torch.Tensor,
    logp_rollout_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    runs_B: Sequence[Runs],
    version: int,
    max_age: int,
) -> torch.Tensor:
    """Return number of tokens, sum of |log-ratio| and sum of its square by group, [G, 3] float64 with G = max_age + 2.

    Nothing waits for the device. Log-ratios are clamped to +-`MAX_LOG_RATIO`; tokens that are not usable (see
    `scalerl_verl.loss.cispo`) and those without a version are left out.

    Args:
        logp_train_BT: log-probabilities under the policy being trained, before its optimizer step, [B, T] floating.
        logp_rollout_BT: log-probabilities recorded when each token was sampled, [B, T] floating.
        mask_BT: True (or non-zero) where a token was sampled and counts, [B, T].
        runs_B: of each row, over its unmasked tokens. A row without any may have runs all the same.
        version: the policy being trained.
        max_age: the greatest age, in versions.
    """
    device, nothing = logp_train_BT.device, max_age + 2
    ends_BR, group_BR = (table.to(device) for table in _tables(runs_B, version, max_age))
    mask_BT = mask_BT.bool()
    usable_BT = usable_tokens(logp_train_BT, logp_rollout_BT, mask_BT)
    log_ratio_BT = (logp_train_BT.double() - logp_rollout_BT.double()).masked_fill(~usable_BT, 0.0)
    size_BT = log_ratio_BT.abs().clamp(max=MAX_LOG_RATIO)
    number_BT = (mask_BT.long().cumsum(-1) - 1).clamp(min=0)
    run_BT = torch.searchsorted(ends_BR, number_BT, right=True)
    group_BT = group_BR.gather(1, run_BT).masked_fill(~usable_BT, nothing)
    terms = torch.stack([torch.ones_like(size_BT), size_BT, size_BT.square()], dim=-1)
    sums = torch.zeros(nothing + 1, 3, dtype=torch.float64, device=device)
    return sums.index_add_(0, group_BT.flatten(), terms.flatten(0, 1))[:nothing]


def report(sums: Sequence[Sequence[float]]) -> dict[str, float]:
    """Values of one micro-batch for verl's workers, each mean as a sum and a weight (see `token_means`).

    Args:
        sums: of `sum_by_age`, as numbers.
    """
    engines, others = sums[0], sums[1:]
    ages = [[a + b for a, b in zip(engines, others[0], strict=True)], *others[1:]]
    found = {}
    for name, (count, total, square) in {"engines": engines, **{f"age_{a}": row for a, row in enumerate(ages)}}.items():
        for mean, value in (("log_ratio_abs_mean", total), ("log_ratio_square_mean", square)):
            found[f"{PREFIX}/{name}/{mean}"] = value
            found[f"{PREFIX}/{name}/{mean}{WEIGHT}"] = count
    found[SQUARE_OF_ALL] = sum(square for _, _, square in ages)
    found[SQUARE_OF_ALL + WEIGHT] = sum(count for count, _, _ in ages)
    return found


def explained_by_age(metrics: Mapping[str, float], engines_square: float | None) -> float | None:
    """Return the part of the mean square log-ratio that the engines do not explain; None where it is unknown.

        1 - mean square of the engines / mean square of all tokens

    It is 0 where every token has age 0, and near 1 where age is all. Below 0 it is noise: age explains nothing.

    Args:
        metrics: of a batch, divided.
        engines_square: the engines' mean square, of this batch or of an earlier one; None: there was none yet.
    """
    square = metrics.get(SQUARE_OF_ALL)
    return None if engines_square is None or not square else 1.0 - engines_square / square


def _tables(runs_B: Sequence[Runs], version: int, max_age: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens up to the end of each run, [B, R] int64, and each run's group, [B, R + 1], the last one that of no run."""
    nothing, never = max_age + 2, torch.iinfo(torch.int64).max
    num_runs = max((len(runs) for runs in runs_B), default=0)
    ends, groups = [], []
    for runs in runs_B:
        is_fresh = all(sampled_under == version for sampled_under, count in runs if count)
        end, row_ends, row_groups = 0, [], []
        for sampled_under, count in runs:
            end, age = end + count, version - sampled_under
            row_ends.append(end)
            row_groups.append(0 if is_fresh else 1 + age if 0 <= age <= max_age else nothing)
        missing = num_runs - len(row_ends)
        ends.append(row_ends + [never] * missing)
        groups.append(row_groups + [nothing] * (missing + 1))
    shape = (len(ends), num_runs)
    return torch.tensor(ends, dtype=torch.int64).reshape(shape), torch.tensor(groups, dtype=torch.int64)
