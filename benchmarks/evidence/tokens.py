# SPDX-License-Identifier: Apache-2.0
"""How many tokens recipes sample to be where ScaleRL is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from benchmarks.evidence.compare import EARLY, LATE, MIDDLE, SIZES, geometric, named
from benchmarks.markdown import table
from benchmarks.miniature.runs import LABELS, MANY, REFERENCE, Group, Points, points_of, score_at

BUDGETS = (EARLY, MIDDLE, 1e6, LATE)


def tokens_to(points: Points, level: float) -> float | None:
    """Sampled tokens at which a run first has a pass rate, between validations on a line over their logarithm.

    0 if it has it at the first validation after the start already, before which there is no line; None if it never has.
    """
    curve = [point for point in zip(points["tokens"], points["pass_rate"], strict=True) if point[0] > 0]
    if curve and curve[0][1] >= level:
        return 0.0
    for (before, low), (after, high) in pairwise(curve):
        if low < level <= high:
            return float(before * (after / before) ** ((level - low) / (high - low)))
    return None


def tokens_text(mine: Mapping[int, Points], theirs: Mapping[int, Points], budget: float) -> str:
    """How many times ``budget`` runs need to reach the pass rate that the others have there, within seeds.

    A ratio is told where all seeds have one; elsewhere, how many do not.
    """
    levels = {seed: score_at(theirs[seed], budget) for seed in sorted(set(mine) & set(theirs))}
    needed = [tokens_to(mine[seed], level) for seed, level in levels.items() if level is not None]
    if len(needed) < max(2, len(levels)):
        return ""
    for missed, what in ((needed.count(None), "not reached"), (needed.count(0.0), "there at the first validation")):
        if missed:
            return f"{what} by {missed} of {len(needed)}"
    mean, low, high = geometric([tokens / budget for tokens in needed if tokens])
    return f"{mean:.2f} ({low:.2f} to {high:.2f})"


def tokens_table(sizes: Sequence[str] = SIZES) -> str:
    """One line a size and recipe: tokens to where ScaleRL is at several budgets, as multiples of them."""
    lines = []
    for size in sizes:
        runs = points_of(named(Group(size, problems=MANY)))
        for name, found in runs.items():
            if name != REFERENCE and REFERENCE in runs:
                lines.append((size, LABELS[name], *(tokens_text(found, runs[REFERENCE], b) for b in BUDGETS)))
    return table(("parameters", "recipe", *(f"ScaleRL at {budget / 1e6:g}M tokens" for budget in BUDGETS)), lines)
