# SPDX-License-Identifier: Apache-2.0
"""All comparisons of the evidence page's tables as one family: which stay after a correction for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.evidence.groups import SIZES, common_budgets, named
from benchmarks.evidence.recipes import EARLY, LATE, LEVEL, MAIN, MIDDLE, add_p, holm
from benchmarks.miniature.runs import FEW, LABELS, MANY, REFERENCE, Group, Runs, paired, points_of, read_group

Comparison = tuple[str, float, list[float]]
"""What is compared, budget in tokens, differences within seeds."""


def comparisons() -> Iterator[Comparison]:
    """Every comparison of recipes in the tables, once."""
    base = points_of(read_group(Group()))
    few = f", 0.3M on {FEW:,}"
    yield from _to_reference(base, REFERENCE, tuple(LABELS), (EARLY, MIDDLE, LATE), few)
    for size in SIZES:
        runs = points_of(named(Group(size, problems=MANY), MAIN))
        if runs:
            yield from _to_reference(runs, REFERENCE, MAIN, common_budgets(runs.values()), f", {size} on {MANY:,}")
    for group, told in ((Group(problems=MANY), f", 0.3M on {MANY:,}"), (Group(k=1), f"{few}, k = 1")):
        runs = points_of(named(group, MAIN))
        if group.k == 1:
            yield from _to_reference(runs, REFERENCE, MAIN, (EARLY, LATE), told)
        for name in runs:
            for budget in (EARLY, LATE):
                yield f"{LABELS[name]}{told} to itself", budget, paired(runs[name], base.get(name, {}), budget)


def _to_reference(
    runs: Runs, reference: str, names: Sequence[str], budgets: Sequence[float], told: str
) -> Iterator[Comparison]:
    for name in names:
        if name in runs and reference in runs and name != reference:
            for budget in budgets:
                yield f"{LABELS[name]}{told}", budget, paired(runs[name], runs[reference], budget)


def family_text() -> str:
    """How many comparisons there are, and which stay below .05 after Holm's correction for all of them."""
    p: dict[tuple[str, float], float] = {}
    for label, budget, differences in comparisons():
        add_p(p, (label, budget), differences)
    if not p:
        return "Not recorded yet: `python -m benchmarks.miniature.bench`."
    stay: dict[str, list[float]] = {}
    for (label, budget), value in holm(p).items():
        if value < 1 - LEVEL:
            stay.setdefault(label, []).append(budget)
    told = "; ".join(
        f"{label} ({', '.join(f'{budget / 1e6:g}M' for budget in sorted(budgets))})" for label, budgets in stay.items()
    )
    return (
        f"The tables below make {len(p)} different comparisons. After Holm's correction for all of them together these "
        "stay below .05, each a recipe, its parameters and training problems, at the tokens in brackets beside ScaleRL "
        f"of the same kind (*to itself*: beside itself on {FEW:,} problems with k = 8): {told or 'none'}."
    )
