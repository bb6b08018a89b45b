# SPDX-License-Identifier: Apache-2.0
"""Group-centred advantages of ScaleRL, normalised over the batch, the prompt or not at all.

Shape legend: B rows (responses), P groups (prompts).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scalerl_verl.advantage.zero_variance import GroupStats, classify_groups, exact_mean, split_by_group
from scalerl_verl.names import ALGORITHM_SECTION, BATCH, DROP, KEEP, NONE, PROMPT
from scalerl_verl.names.keys import defaults

_DEFAULT = defaults(ALGORITHM_SECTION)
ADV_NORMS: tuple[str, ...] = (BATCH, PROMPT, NONE)
ZERO_VARIANCE_MODES: tuple[str, ...] = (DROP, KEEP)


@dataclass(frozen=True, eq=False)
class AdvantageResult:
    """Advantages per row and what they were made from.

    Attributes:
        advantages_B: advantage per row, exactly 0 for rows that are not kept, [B] float64.
        kept_B: rows that count in the loss and its denominators, [B] bool.
        groups: kind of every group; the same for every `adv_norm` and `zero_variance`.
        std: biased standard deviation of the centred rewards over the kept rows, whatever `adv_norm`; 0 if none is.
    """

    advantages_B: NDArray[np.float64]
    kept_B: NDArray[np.bool_]
    groups: GroupStats
    std: float


def scalerl_advantages(
    rewards_B: ArrayLike,
    group_ids_B: Sequence[Hashable] | NDArray[Any],
    trains_B: ArrayLike,
    *,
    adv_norm: str = _DEFAULT["adv_norm"],
    zero_variance: str = _DEFAULT["zero_variance"],
    tolerance_B: ArrayLike | None = None,
) -> AdvantageResult:
    """Return the advantage of every row: its reward minus the mean of its group, divided by a standard deviation.

        A_i = r_i - mean(r over the rows of its group that train)
        batch:  A_i / std(A over all kept rows)
        prompt: A_i / std(A over its group)
        none:   A_i

    A row trains if it has at least one unmasked token (`trains_B`). Standard deviations are biased (divided by the
    count), and no epsilon is added: where the standard deviation is 0, the advantages are 0. A is exactly 0 in groups
    whose rewards are equal up to rounding. The result is bit-identical for every order of the rows and does not depend
    on padding rows.

    `zero_variance` says which rows that train are kept, that is, count in the loss and its denominators. "drop" keeps
    the groups whose rewards differ. "keep" also keeps the groups whose rewards are all equal: they have advantage 0,
    and they count in the batch's standard deviation. A group of one row has no baseline, so neither mode keeps it.

    Args:
        rewards_B: reward per row, [B] float64.
        group_ids_B: hashable id of the prompt per row, [B]. Groups may be incomplete and lie in any order.
        trains_B: False for padding rows and rows without an unmasked token, [B] bool. These get exactly 0 and enter
            no mean, standard deviation or count.
        adv_norm: "batch", "prompt" or "none".
        zero_variance: "drop" or "keep".
        tolerance_B: as in `classify_groups`.

    Returns:
        AdvantageResult: `advantages_B` [B] float64; `kept_B` [B] bool, the rows that count in the loss; `groups`, the
        result of `classify_groups`; `std`, the biased standard deviation of A over the kept rows.

    Raises:
        ValueError: `adv_norm` or `zero_variance` has another value, or in the same cases as `classify_groups`.

    Source: arXiv 2510.13786, section 2. The paper does not say whether the standard deviation of the batch is taken
    before or after filtering; here it is taken after.
    """
    if adv_norm not in ADV_NORMS:
        raise ValueError(f"adv_norm is {adv_norm!r}; allowed are {', '.join(ADV_NORMS)}. Set one of these.")
    if zero_variance not in ZERO_VARIANCE_MODES:
        raise ValueError(
            f"zero_variance is {zero_variance!r}; allowed are {', '.join(ZERO_VARIANCE_MODES)}. Set one of these."
        )
    rewards_B = np.asarray(rewards_B, dtype=np.float64)
    groups = classify_groups(rewards_B, group_ids_B, trains_B, tolerance_B=tolerance_B)
    index_B, mixed_B = groups.group_index_B, groups.kept_B

    # Zero-variance groups keep the exact 0 of this array: r - mean(r) would leave rounding noise there.
    advantages_B = np.zeros(rewards_B.shape, dtype=np.float64)
    advantages_B[mixed_B] = rewards_B[mixed_B] - groups.mean_P[index_B[mixed_B]]

    kept_B = mixed_B.copy()
    if zero_variance == KEEP:
        trains_B = index_B >= 0
        kept_B[trains_B] = groups.size_P[index_B[trains_B]] > 1
    std = _biased_std(advantages_B[kept_B])

    # Only mixed groups are divided. Their rewards differ by more than rounding, so neither divisor can be 0.
    if adv_norm == BATCH:
        advantages_B[mixed_B] /= std
    elif adv_norm == PROMPT:
        by_group = split_by_group(advantages_B, index_B, groups.size_P)
        std_P = np.array([_biased_std(values) for values in by_group], dtype=np.float64)
        advantages_B[mixed_B] /= std_P[index_B[mixed_B]]
    return AdvantageResult(advantages_B=advantages_B, kept_B=kept_B, groups=groups, std=std)


def _biased_std(values: NDArray[np.float64]) -> float:
    """Return sqrt(mean((x - mean(x))^2)), 0 for no values, the same for every order of them."""
    if values.size == 0:
        return 0.0
    return math.sqrt(exact_mean(np.square(values - exact_mean(values))))
