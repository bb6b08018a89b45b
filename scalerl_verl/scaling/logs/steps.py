# SPDX-License-Identifier: Apache-2.0
"""Numbers of training steps: which are missing, and how to name them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

MAX_NAMED = 10
"""Steps or ranges of them that a note names."""


def find_missing(steps: Iterable[int]) -> list[int]:
    """Steps from 1 to the last that are missing in a log of every step.

    A log whose neighbours are mostly further apart than one step, such as one of validations, misses nothing.
    """
    logged = sorted({step for step in steps if step >= 0})
    apart = [later - earlier for earlier, later in pairwise(logged)]
    if 2 * apart.count(1) <= len(apart):
        return []
    return sorted(set(range(1, logged[-1])) - set(logged))


def name_steps(steps: Iterable[int], most: int | None = None) -> str:
    """``[3, 5, 6, 7]`` as ``3, 5 to 7``; at most so many numbers and ranges."""
    runs: list[list[int]] = []
    for step in sorted(steps):
        if runs and step == runs[-1][-1] + 1:
            runs[-1][1:] = [step]
        else:
            runs.append([step])
    return ", ".join(" to ".join(map(str, run)) for run in runs[:most]) + (", ..." if runs[most or len(runs) :] else "")
