# SPDX-License-Identifier: Apache-2.0
"""Which groups (the responses to one prompt) carry a learning signal.

Shape legend: B rows (responses), P groups (prompts).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

GroupKind = Literal["mixed", "all_right", "all_wrong", "single"]

FP32_UNIT = 2.0**-23
"""Distance from 1 to the next number in FP32, the dtype in which verl keeps rewards."""
NUM_UNITS = 4
"""Units by which equal rewards may differ: two numbers, each the result of two operations that round by half a unit or,
just below a power of two, by a whole one."""
CANCELLATION = 1.0e-12
"""What may be left of numbers around 1 that cancel in float64 (0.1 + 0.2 - 0.3 is 5.6e-17), and no reward that is
meant."""


def rounding_error(magnitude_B: ArrayLike, unit: float = FP32_UNIT) -> NDArray[np.float64]:
    """Return by how much equal rewards may differ, [B] float64.

        tol = max(max(4 * 2^-23, unit) * magnitude, 1e-12)

    Args:
        magnitude_B: |r|, or the sum of the magnitudes of what was added up to r, [B].
        unit: that of the dtype of the summands, if it is coarser than FP32: 2^-7 for bfloat16. Each summand is rounded
            once, by half a unit, hence two rewards differ by one.
    """
    magnitude: NDArray[np.float64] = np.asarray(magnitude_B, dtype=np.float64)
    return np.maximum(max(NUM_UNITS * FP32_UNIT, unit) * magnitude, CANCELLATION)


@dataclass(frozen=True, eq=False)
class GroupStats:
    """Kind of every group, and which rows carry a learning signal.

    Attributes:
        group_index_B: group of every row, -1 where the row does not train, [B] int64.
        kind_P: kind of every group in order of first appearance.
        size_P: rows that train of every group, [P] int64.
        mean_P: mean reward of every group over the rows that train, [P] float64.
        kept_B: rows of mixed groups, [B] bool.
        num_groups: groups with at least one row that trains.
        num_mixed: groups of two rows or more whose rewards differ.
        num_all_right: groups of two rows or more whose rewards are equal and positive.
        num_all_wrong: groups of two rows or more whose rewards are equal and not positive.
        num_single: groups of one row.
        num_rows: rows that train.
        num_rows_kept: rows of mixed groups.
    """

    group_index_B: NDArray[np.int64]
    kind_P: tuple[GroupKind, ...]
    size_P: NDArray[np.int64]
    mean_P: NDArray[np.float64]
    kept_B: NDArray[np.bool_]
    num_groups: int
    num_mixed: int
    num_all_right: int
    num_all_wrong: int
    num_single: int
    num_rows: int
    num_rows_kept: int


def classify_groups(
    rewards_B: ArrayLike,
    group_ids_B: Sequence[Hashable] | NDArray[Any],
    trains_B: ArrayLike,
    *,
    tolerance_B: ArrayLike | None = None,
) -> GroupStats:
    """Classify every group (the responses to one prompt) by the rewards of its rows that train.

        single     one row: its advantage is 0, because the group's mean is its own reward
        mixed      max r - min r > tol: the only groups with a learning signal
        all_right  rewards equal, mean r > tol
        all_wrong  rewards equal, mean r <= tol

    tol is the largest tolerance of the group's rows. The range of the rewards is compared, not their standard
    deviation: the standard deviation of [0.1, 0.1, 0.1] is 1.4e-17 in float64, not 0, and dividing by it would turn
    rounding noise into advantages. The default tolerance is relative, because the scale of rewards is unknown: 1e6 and
    1e6 + 1 differ, and so do 0 and 1e-6. As in the paper, a response passes if its reward is above 0, so a reward of 0
    is wrong. Groups may have any size, may be incomplete, and their rows may be in any order.

    Args:
        rewards_B: reward per row, [B] float64.
        group_ids_B: hashable id of the prompt per row, [B].
        trains_B: False for padding rows and rows without an unmasked token, [B] bool. What they hold is ignored.
        tolerance_B: how much rewards that are meant to be equal may differ by rounding, [B]. None:
            max(4 * 2^-23 * |r|, 1e-12).

    Returns:
        GroupStats: `kind_P`, `size_P` and `mean_P` of every group in order of first appearance; `group_index_B`, the
        group of every row (-1: the row does not train); `kept_B`, the rows of mixed groups; and counts of each kind.

    Raises:
        ValueError: lengths differ, `trains_B` is not boolean, or a row that trains has a non-finite reward.

    Source: arXiv 2510.13786, section 2 (zero-variance prompts).
    """
    group_index_B, num_groups = index_groups(group_ids_B, trains_B)
    rewards_B = np.asarray(rewards_B, dtype=np.float64)
    trains_B = group_index_B >= 0
    if rewards_B.shape != group_index_B.shape:
        raise ValueError(
            f"rewards_B has shape {rewards_B.shape} for {group_index_B.size} rows; it must be one reward per row. "
            f"Sum token-level rewards first."
        )
    bad_B = trains_B & ~np.isfinite(rewards_B)
    if bad_B.any():
        raise ValueError(
            f"{int(bad_B.sum())} rows that train have a non-finite reward, first row {int(bad_B.argmax())} of prompt "
            f"{group_ids_B[int(bad_B.argmax())]}; rewards must be finite. Correct the reward function or exclude the "
            f"row by trains_B=False."
        )
    tolerance_B = rounding_error(np.abs(rewards_B)) if tolerance_B is None else np.asarray(tolerance_B)
    size_P = np.bincount(group_index_B[trains_B], minlength=num_groups).astype(np.int64)
    by_group = [split_by_group(values, group_index_B, size_P) for values in (rewards_B, tolerance_B)]
    mean_P = np.array([exact_mean(rewards) for rewards in by_group[0]], dtype=np.float64)
    kinds = [_kind(*group) for group in zip(*by_group, mean_P.tolist(), strict=True)]
    mixed_P = np.array([kind == "mixed" for kind in kinds], dtype=bool)
    kept_B = np.zeros(trains_B.shape, dtype=bool)
    kept_B[trains_B] = mixed_P[group_index_B[trains_B]]
    return GroupStats(
        group_index_B=group_index_B,
        kind_P=tuple(kinds),
        size_P=size_P,
        mean_P=mean_P,
        kept_B=kept_B,
        num_groups=num_groups,
        num_mixed=kinds.count("mixed"),
        num_all_right=kinds.count("all_right"),
        num_all_wrong=kinds.count("all_wrong"),
        num_single=kinds.count("single"),
        num_rows=int(trains_B.sum()),
        num_rows_kept=int(kept_B.sum()),
    )


def index_groups(group_ids_B: Sequence[Hashable] | NDArray[Any], select_B: ArrayLike) -> tuple[NDArray[np.int64], int]:
    """Number the groups of the selected rows 0, 1, ... in order of first appearance.

    Args:
        group_ids_B: hashable id of the prompt per row, [B]. Ids of rows not selected are not read.
        select_B: rows to number, [B] bool.

    Returns:
        Index of the group per row, -1 where not selected, [B] int64; and the number of groups.

    Raises:
        ValueError: if lengths differ or `select_B` is not boolean.
    """
    select_B = np.asarray(select_B)
    if select_B.dtype != np.bool_ or select_B.ndim != 1:
        raise ValueError(
            f"The row selection has dtype {select_B.dtype} and shape {select_B.shape}; one bool per row is allowed. "
            f"Convert it with .astype(bool)."
        )
    if len(group_ids_B) != select_B.size:
        raise ValueError(f"There are {len(group_ids_B)} group ids for {select_B.size} rows; pass one id per row.")
    # tolist() turns NumPy scalars into Python objects: equal ids of differing NumPy types hash alike.
    ids = group_ids_B.tolist() if isinstance(group_ids_B, np.ndarray) else group_ids_B
    index_of: dict[Hashable, int] = {}
    index_B = np.full(select_B.size, -1, dtype=np.int64)
    for i in np.flatnonzero(select_B).tolist():
        index_B[i] = index_of.setdefault(ids[i], len(index_of))
    return index_B, len(index_of)


def split_by_group(
    values_B: NDArray[np.float64], group_index_B: NDArray[np.int64], size_P: NDArray[np.int64]
) -> list[NDArray[np.float64]]:
    """Return the values of every group's rows; rows of index -1 are in no group."""
    order = np.argsort(group_index_B, kind="stable")[np.count_nonzero(group_index_B < 0) :]
    return np.split(values_B[order], np.cumsum(size_P)[:-1]) if size_P.size else []


def exact_mean(values: NDArray[np.float64]) -> float:
    """Return the mean of at least one value, the same to the last bit for every order of the values."""
    # A pairwise sum depends on the order of rows, which balancing over ranks changes; fsum is exact.
    return math.fsum(values.tolist()) / values.size


def _kind(rewards: NDArray[np.float64], tolerances: NDArray[np.float64], mean: float) -> GroupKind:
    """Return the kind of one group from its rows that train."""
    if rewards.size == 1:
        return "single"
    tolerance = float(tolerances.max())
    if float(rewards.max() - rewards.min()) > tolerance:
        return "mixed"
    return "all_right" if mean > tolerance else "all_wrong"
