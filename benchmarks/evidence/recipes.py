# SPDX-License-Identifier: Apache-2.0
"""Tables of the miniature's recorded curves: recipes beside ScaleRL, and beside themselves where one thing differs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks.evidence.compare import (
    EARLY,
    LATE,
    MAIN,
    MIDDLE,
    SIZES,
    common_budgets,
    detectable_text,
    difference_text,
    mean_at,
    named,
)
from benchmarks.markdown import table, where_table
from benchmarks.miniature.runs import (
    LABELS,
    MANY,
    REFERENCE,
    Group,
    Points,
    Row,
    paired,
    points_of,
    read_group,
    shared,
)

SAME_FOR_ALL = ("lr", "test_problems")
"""Of a case: rows that differ there are not compared."""


def comparison_table(budgets: Sequence[float] = (EARLY, MIDDLE, LATE)) -> str:
    """One line a recipe: pass rate at the budgets and the difference to ScaleRL within seeds, with its power.

    Recipes that were not run as far as one of the budgets are left out.
    """
    rows = read_group(Group())
    check([row for found in rows.values() for row in found.values()])
    runs = points_of(rows)
    lines = []
    for name, found in runs.items():
        cells = [cell for budget in budgets for cell in _compared(name, found, runs[REFERENCE], budget)]
        if any(cells):
            lines.append([_counted(name, len(found), len(runs[REFERENCE])), *cells])
    heads = [head for b in budgets for head in (f"pass rate at {b / 1e6:g}M tokens", "difference", "detectable")]
    return table(("recipe", *heads), lines)


def check(rows: Sequence[Row]) -> None:
    """Refuse rows that differ in more than what a table compares.

    Raises:
        ValueError: in the learning rate, or in the number of held-out problems.
    """
    for key in SAME_FOR_ALL:
        shared(rows, key)


def _compared(name: str, mine: Mapping[int, Points], reference: Mapping[int, Points], budget: float) -> list[str]:
    """Pass rate, difference to the reference, and what its seeds could show; empty beyond the end of a run."""
    score = mean_at(mine, budget)
    if score is None:
        return ["", "", ""]
    if name == REFERENCE or not reference:
        return [f"{score:.3f}", "", ""]
    differences = paired(mine, reference, budget)
    num = len(set(mine) & set(reference))
    return [f"{score:.3f}", difference_text(differences, num), detectable_text(differences)]


def _counted(name: str, num: int, usual: int) -> str:
    return LABELS[name] if num == usual else f"{LABELS[name]} ({num} seed{'s' * (num > 1)})"


def recipes_where() -> str:
    """Where all of the miniature's rows on the page were made."""
    groups = [*(Group(size, problems=MANY) for size in SIZES), Group(), Group(k=1)]
    rows = {
        f"{group.size}, {group.problems:,} problems, k = {group.k}": [
            row for found in read_group(group).values() for row in found.values()
        ]
        for group in groups
    }
    return where_table(rows, ("torch",), has_commands=False)


def many_table() -> str:
    """Recipes on many problems beside themselves on few."""
    return variant_table(Group(problems=MANY), MAIN, "training problems", lambda group: f"{group.problems:,}")


def k_table() -> str:
    """Recipes that train once on each generated batch beside themselves training eight times."""
    return variant_table(Group(k=1), MAIN[:2], "k", lambda group: f"{group.k}")


def variant_table(group: Group, names: Sequence[str], column: str, value: Callable[[Group], str]) -> str:
    """Recipes of a group beside themselves in the base group, and beside ScaleRL of their own, within seeds."""
    theirs = named(group, names)
    rows = {(Group(), name): found for name, found in named(Group(), tuple(theirs)).items()}
    rows |= {(group, name): found for name, found in theirs.items()}
    check([row for found in rows.values() for row in found.values()])
    runs = {key: {seed: row["points"] for seed, row in found.items()} for key, found in rows.items()}
    budgets = common_budgets(runs.values())
    lines = []
    for (mine, name), found in runs.items():
        itself = runs[Group(), name] if mine != Group() and (Group(), name) in runs else None
        reference = runs.get((mine, REFERENCE)) if name != REFERENCE else None
        cells = [cell for budget in budgets for cell in _beside(found, itself, reference, budget)]
        lines.append([value(mine), f"{LABELS[name]}, {len(found)} seed{'s' * (len(found) > 1)}", *cells])
    to_itself = f"to itself at {value(Group())}"
    heads = [head for b in budgets for head in (f"pass rate at {b / 1e6:g}M tokens", to_itself, "to ScaleRL")]
    return table((column, "recipe", *heads), lines)


def _beside(
    mine: Mapping[int, Points],
    itself: Mapping[int, Points] | None,
    reference: Mapping[int, Points] | None,
    budget: float,
) -> list[str]:
    score = mean_at(mine, budget)
    cells = ["" if score is None else f"{score:.3f}"]
    for other in (itself, reference):
        differences = paired(mine, other, budget) if other else []
        cells.append(difference_text(differences, len(set(mine) & set(other))) if other else "")
    return cells


def sizes_table() -> str:
    """Recipes on many problems by size of the model, beside ScaleRL of that size, early and as far as all of it go."""
    lines = []
    for size in SIZES:
        rows = named(Group(size, problems=MANY))
        if rows:
            flat = [row for found in rows.values() for row in found.values()]
            check(flat)
            lr = f"{shared(flat, 'lr'):g}"
            lines += [[size, str(len(rows[name])), lr, *cells] for name, cells in _size_cells(points_of(rows)).items()]
    early = (f"at {EARLY / 1e6:g}M tokens", "difference", "detectable")
    late = ("at the end", "difference", "detectable")
    heads = ("parameters", "seeds", "learning rate", "recipe", "pass rate before training", *early, *late)
    return table(heads, lines)


def _size_cells(runs: dict[str, dict[int, Points]]) -> dict[str, list[str]]:
    """Recipe -> cells of its line after those that all of the size have."""
    last = common_budgets(runs.values())[-1]
    cells = {}
    for name, found in runs.items():
        reference = runs.get(REFERENCE, {})
        start = statistics.fmean(points["pass_rate"][0] for points in found.values())
        end = _compared(name, found, reference, last) if last != EARLY else ["", "", ""]
        told = [f"{end[0]} at {last / 1e6:g}M" if end[0] else "", *end[1:]]
        cells[name] = [LABELS[name], f"{start:.3f}", *_compared(name, found, reference, EARLY), *told]
    return cells


def dropped_table() -> str:
    """Problems left out, prompts with a signal and pass rate of ScaleRL, every second validation, mean over seeds."""
    found = list(points_of(read_group(Group()))[REFERENCE].values())
    steps = sorted(set.intersection(*(set(points["updates"]) for points in found)) - {0})
    lines = []
    for step in steps[1::2]:
        tokens, dropped, kept, rate = (
            statistics.fmean(points[name][points["updates"].index(step)] for points in found)
            for name in ("tokens", "dropped", "kept_fraction", "pass_rate")
        )
        lines.append((step, f"{tokens / 1e6:.2f}M", f"{dropped:,.0f}", f"{kept:.0%}", f"{rate:.3f}"))
    return table(
        ("optimizer steps", "tokens", "mastered problems left out", "prompts with a signal", "pass rate"), lines
    )
