# SPDX-License-Identifier: Apache-2.0
"""All comparisons of the evidence page's tables as one family: which stay after a correction for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.evidence.compare import (
    EARLY,
    LATE,
    LEVEL,
    MAIN,
    MIDDLE,
    SIZES,
    common_budgets,
    difference_text,
    holm,
    named,
    p_value,
)
from benchmarks.markdown import table
from benchmarks.miniature.runs import FEW, LABELS, MANY, REFERENCE, Group, Runs, paired, points_of, read_group

Key = tuple[str, str, str, float]
"""Recipe, its runs, what it stands beside, budget in tokens."""


def comparisons() -> Iterator[tuple[Key, list[float]]]:
    """Every comparison of recipes in the tables, once, with its differences within seeds."""
    base = points_of(read_group(Group()))
    few = f"0.3M, {FEW:,}"
    yield from _to_reference(base, tuple(LABELS), (EARLY, MIDDLE, LATE), few)
    for size in SIZES:
        runs = points_of(named(Group(size, problems=MANY)))
        if runs:
            yield from _to_reference(runs, MAIN, common_budgets(runs.values()), f"{size}, {MANY:,}")
    for group, told in ((Group(problems=MANY), f"0.3M, {MANY:,}"), (Group(k=1), f"{few}, k = 1")):
        runs = points_of(named(group))
        if group.k == 1:
            yield from _to_reference(runs, MAIN, (EARLY, LATE), told)
        for name in runs:
            for budget in (EARLY, LATE):
                yield (LABELS[name], told, f"itself, {few}", budget), paired(runs[name], base.get(name, {}), budget)


def _to_reference(
    runs: Runs, names: Sequence[str], budgets: Sequence[float], told: str
) -> Iterator[tuple[Key, list[float]]]:
    for name in names:
        if name in runs and REFERENCE in runs and name != REFERENCE:
            for budget in budgets:
                yield (LABELS[name], told, LABELS[REFERENCE], budget), paired(runs[name], runs[REFERENCE], budget)


def family_table() -> str:
    """Comparisons that stay below .05 after Holm's correction for all of them, the surest first."""
    differences = dict(comparisons())
    p = {key: value for key, found in differences.items() if (value := p_value(found)) is not None}
    stay = {key: value for key, value in holm(p).items() if value < 1 - LEVEL}
    heads = ("recipe", "runs", "beside", "at tokens", "difference", f"p, corrected for {len(p)}")
    lines = [
        (*key[:3], f"{key[3] / 1e6:g}M", difference_text(differences[key]), f"{value:.1g}")
        for key, value in stay.items()
    ]
    return table(heads, lines)
