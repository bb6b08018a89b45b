# SPDX-License-Identifier: Apache-2.0
"""Sessions of several outputs: a response that an agent loop left in more than one row.

A session is one attempt at a prompt, and its reward is one sample of the group. Statistics count it once; its tokens
train wherever they stand. So a session may be cut into any number of rows without changing the objective.

Shape legend: B rows (outputs), S sessions (responses).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scalerl_verl.advantage.estimator import AdvantageResult, scalerl_advantages


@dataclass(frozen=True, eq=False)
class Sessions:
    """Which rows belong to which session.

    Attributes:
        index_B: session of every row, numbered in order of first appearance, [B] int64.
        final_row_S: row of the last output of every session, [S] int64. Its reward is the session's: verl scores the
            last output and copies the score to the others.
    """

    index_B: NDArray[np.int64]
    final_row_S: NDArray[np.int64]

    @classmethod
    def one_per_row(cls, num_rows: int) -> Sessions:
        """Every row is a session of its own."""
        rows = np.arange(num_rows, dtype=np.int64)
        return cls(index_B=rows, final_row_S=rows)

    def has_any(self, flags_B: ArrayLike) -> NDArray[np.bool_]:
        """Whether a row of the session is True, [S] bool."""
        return self.sum_rows(np.asarray(flags_B, dtype=np.bool_)) > 0

    def sum_rows(self, values_B: ArrayLike) -> NDArray[np.float64]:
        """Sum over the rows of every session, [S] float64."""
        weights: NDArray[np.float64] = np.asarray(values_B, dtype=np.float64)
        return np.bincount(self.index_B, weights=weights, minlength=self.final_row_S.size).astype(np.float64)


def index_sessions(row_keys_B: Sequence[str]) -> Sessions:
    """Read the sessions from verl's row keys.

    Args:
        row_keys_B: ``<prompt uid>_<session>_<index of the output in the session>`` per row, [B], in any order.

    Returns:
        Sessions.

    Raises:
        ValueError: a key of another form, or one that stands there twice.
    """
    numbers: dict[str, int] = {}
    final: list[tuple[int, int]] = []
    index_B = np.zeros(len(row_keys_B), dtype=np.int64)
    if len(set(row_keys_B)) != len(row_keys_B):
        twice = next(key for key in row_keys_B if list(row_keys_B).count(key) > 1)
        raise ValueError(f"row key {twice!r} is in the batch twice: each row needs its own <uid>_<session>_<output>")
    for row, key in enumerate(row_keys_B):
        session, _, output = key.rpartition("_")
        if "_" not in session or not output.isdecimal():
            raise ValueError(f"row key {key!r} is not of the form <uid>_<session>_<output>, which verl's trainer uses")
        number = index_B[row] = numbers.setdefault(session, len(numbers))
        if number == len(final):
            final.append((int(output), row))
        else:
            final[number] = max(final[number], (int(output), row))
    return Sessions(index_B=index_B, final_row_S=np.array([row for _, row in final], dtype=np.int64))


def session_advantages(
    rewards_B: ArrayLike,
    group_ids_B: Sequence[Hashable] | NDArray[Any],
    trains_B: ArrayLike,
    sessions: Sessions,
    *,
    tolerance_B: ArrayLike | None = None,
    **options: str,
) -> AdvantageResult:
    """`scalerl_advantages` of the sessions, given to each of their rows.

    Args:
        rewards_B: reward per row; only that of a session's last output counts, [B] float64.
        group_ids_B: hashable id of the prompt per row, [B].
        trains_B: False for padding rows and rows without an unmasked token, [B] bool. A session trains if any of its
            rows does; its last output need not.
        sessions: of the same rows.
        tolerance_B: as in `classify_groups`, per row; that of a session's last output counts.
        options: ``adv_norm`` and ``zero_variance``.

    Returns:
        AdvantageResult: `advantages_B` and `kept_B` per row, exactly 0 and False where a row does not train; `groups`
        and `std` count each session once (rows of `groups` are sessions).

    Raises:
        ValueError: as `scalerl_advantages`.
    """
    trains_B = np.asarray(trains_B)
    final_S, index_B = sessions.final_row_S, sessions.index_B
    rewards_S = np.asarray(rewards_B, dtype=np.float64)[final_S]
    tolerance_S = None if tolerance_B is None else np.asarray(tolerance_B, dtype=np.float64)[final_S]
    ids_S = [group_ids_B[row] for row in final_S.tolist()]
    result = scalerl_advantages(rewards_S, ids_S, sessions.has_any(trains_B), tolerance_B=tolerance_S, **options)
    return AdvantageResult(
        advantages_B=np.where(trains_B, result.advantages_B[index_B], 0.0),
        kept_B=result.kept_B[index_B] & trains_B,
        groups=result.groups,
        std=result.std,
    )
