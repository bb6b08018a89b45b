# SPDX-License-Identifier: Apache-2.0
"""Tables of the miniature's recorded curves: recipes beside ScaleRL, paired by seed.

python benchmarks/miniature_table.py    draw docs/evidence.png anew

Seeds share a warm start across recipes, so differences are taken within a seed; intervals are Student's over seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from miniature_fits import LATE, draw
from miniature_runs import (
    FEW,
    KEPT,
    LABELS,
    REFERENCE,
    Group,
    Points,
    Row,
    paired,
    points_of,
    provenance,
    read_group,
    score_at,
    shared,
)
from scipy import stats

MAIN = ("scalerl", "grpo", "dapo", "gspo")
MANY = 16384
MANY_NAMES = ("scalerl", "grpo")
EARLY = 0.6e6
"""Sampled tokens: just before the first pass over the problems ends."""
POWER, LEVEL = 0.8, 0.95


def half_width(differences: Sequence[float]) -> float:
    """Of the interval of their mean."""
    degrees = len(differences) - 1
    return float(stats.t.ppf((1 + LEVEL) / 2, degrees)) * statistics.stdev(differences) / math.sqrt(len(differences))


def detectable(differences: Sequence[float]) -> float:
    """The difference that so many seeds would show in four of five tries, at the spread these have."""
    degrees = len(differences) - 1
    factor = float(stats.t.ppf((1 + LEVEL) / 2, degrees) + stats.t.ppf(POWER, degrees))
    return factor * statistics.stdev(differences) / math.sqrt(len(differences))


def holm(p: Mapping[Any, float]) -> dict[Any, float]:
    """p values corrected for their number (Holm 1979, doi 10.2307/4615733), smallest first."""
    corrected, highest = {}, 0.0
    for rank, key in enumerate(sorted(p, key=p.__getitem__)):
        highest = max(highest, min(1.0, p[key] * (len(p) - rank)))
        corrected[key] = highest
    return corrected


def correction(p: Mapping[tuple[str, float], float]) -> str:
    """How many comparisons a table makes, each (label, budget), and which of them stay significant together."""
    if len(p) == 1:
        return "One comparison."
    stay: dict[float, list[str]] = {}
    for (label, budget), value in holm(p).items():
        if value < 1 - LEVEL:
            stay.setdefault(budget, []).append(label)
    told = "; ".join(f"at {budget / 1e6:g}M {', '.join(labels)}" for budget, labels in sorted(stay.items()))
    return f"{len(p)} comparisons; by Holm's correction for so many, what stays below .05 is: {told or 'nothing'}."


def comparison_table(
    group: Group | None = None,
    budgets: Sequence[float] = (EARLY, LATE),
    reference: str = REFERENCE,
    names: Sequence[str] = tuple(LABELS),
) -> str:
    """One line a recipe: pass rate at the budgets and the paired difference to the reference, with its power.

    Recipes that were not run as far as one of the budgets are left out.
    """
    group = group or Group()
    rows = {name: found for name, found in read_group(group).items() if name in (*names, reference)}
    if reference not in rows:
        return "Not recorded yet: `python benchmarks/bench_miniature.py`."
    runs = points_of(rows)
    heads = [f"pass rate at {budget / 1e6:g}M tokens | difference | detectable" for budget in budgets]
    lines = [f"| recipe | {' | '.join(heads)} |", "|---" * (1 + 3 * len(budgets)) + "|"]
    p: dict[tuple[str, float], float] = {}
    told: dict[str, list[Row]] = {}
    for name in runs:
        cells = []
        for budget in budgets:
            differences = paired(runs[name], runs[reference], budget)
            score = mean_at(runs[name], budget)
            if score is None:
                cells.append("not run so far | | ")
                continue
            _add_p(p, (LABELS[name], budget), differences)
            num = len(set(runs[name]) & set(runs[reference]))
            cells.append(f"{score:.3f} | {_with_power(differences, num, name == reference)}")
        if any("not run" not in cell for cell in cells):
            told[LABELS[name]] = list(rows[name].values())
            lines.append(f"| {_counted(name, rows, reference)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{footer(group, LABELS[reference], told)} {correction(p)}"])


def mean_at(runs: Mapping[int, Points], budget: float) -> float | None:
    """Mean pass rate over seeds at a budget; None if one of them has none there."""
    scores = [score_at(points, budget) for points in runs.values()]
    found = [score for score in scores if score is not None]
    return statistics.fmean(found) if len(found) == len(scores) else None


def _add_p(p: dict[tuple[str, float], float], key: tuple[str, float], differences: Sequence[float]) -> None:
    if len(differences) > 1 and any(differences):
        p[key] = float(stats.ttest_1samp(differences, 0).pvalue)


def _counted(name: str, rows: Mapping[str, Mapping[int, Row]], reference: str) -> str:
    """A recipe's label, with its number of seeds where that is not the reference's."""
    num = len(rows[name])
    return LABELS[name] if num == len(rows[reference]) else f"{LABELS[name]} ({num} seed{'s' * (num > 1)})"


def _with_power(differences: Sequence[float], num: int, is_reference: bool) -> str:
    if is_reference:
        return " | "
    power = f"{detectable(differences):.3f}" if len(differences) > 1 and any(differences) else ""
    return f"{_of_pairs(differences, num)} | {power}"


def _of_pairs(differences: Sequence[float], num: int) -> str:
    """`difference_text`, with the number of pairs where not all ``num`` seeds of both go as far as the budget."""
    text = difference_text(differences)
    return text if len(differences) in (0, 1, num) else f"{text} ({len(differences)} of {num} seeds)"


def difference_text(differences: Sequence[float]) -> str:
    """Mean difference with its interval, in bold where 0 is outside."""
    if len(differences) < 2:
        return "fewer than two seeds"
    if not any(differences):
        return "the same run so far"
    mean, half = statistics.fmean(differences), half_width(differences)
    shown = f"{mean:+.3f} ± {half:.3f}"
    return f"**{shown}**" if abs(mean) > half else shown


def footer(group: Group, reference: str, rows: Mapping[str, Sequence[Row]]) -> str:
    """Where the numbers of one group's labelled rows come from."""
    flat = [row for found in rows.values() for row in found]
    seeds = len({row["case"]["seed"] for row in flat})
    return (
        f"{_sizes(group, flat)}; {group.problems:,} training problems; {shared(flat, 'test_problems'):,} held-out "
        f"problems, 4 samples each. Differences to *{reference}* within seeds with 95% intervals, in bold where 0 is "
        f"outside; *detectable*: what {seeds} seeds of this spread show in 80% of tries. {provenance(rows)}; "
        "`bench_miniature.py`."
    )


def _sizes(group: Group, rows: Sequence[Row]) -> str:
    seeds = len({row["case"]["seed"] for row in rows})
    return (
        f"{group.size} parameters, {seeds} seeds, each with a warm start of its own that all recipes share; "
        f"k = {group.k} optimizer steps of 32 x 16 responses on a generated batch, learning rate {shared(rows, 'lr'):g}"
    )


def kept_table() -> str:
    """The baselines beside ScaleRL without the piece that they do not have either."""
    return comparison_table(reference=KEPT, names=MAIN[1:])


def larger_table() -> str:
    """The larger model, as far as it was run."""
    return comparison_table(Group("3M"), (0.4e6,))


def many_table() -> str:
    """ScaleRL and GRPO on many problems beside themselves on few, and beside each other, within seeds."""
    rows = {(num, name): found for num in (FEW, MANY) for name, found in _main_rows(num).items()}
    if not any(num == MANY for num, _ in rows):
        return (
            f"Not run yet: `python benchmarks/bench_miniature.py --warm warm/0.3M --out out/0.3M.{MANY} "
            f"--train-problems {MANY} --recipe scalerl --recipe grpo`."
        )
    runs = {key: points_of({"": found})[""] for key, found in rows.items()}
    budgets = _common_budgets([points for found in runs.values() for points in found.values()])
    heads = [f"pass rate at {b / 1e6:g}M tokens | to itself with {FEW:,} | to ScaleRL" for b in budgets]
    lines = [f"| training problems | recipe | {' | '.join(heads)} |", "|---" * (2 + 3 * len(budgets)) + "|"]
    p: dict[tuple[str, float], float] = {}
    for (num, name), found in runs.items():
        cells = []
        for budget in budgets:
            score = mean_at(found, budget)
            cells.append("not run so far" if score is None else f"{score:.3f}")
            for other, what in (((FEW, name), f"to {FEW:,}"), ((num, REFERENCE), "to ScaleRL")):
                if other == (num, name) or other not in runs:
                    cells.append("")
                    continue
                differences = paired(found, runs[other], budget)
                _add_p(p, (f"{LABELS[name]} with {num:,} {what}", budget), differences)
                cells.append(_of_pairs(differences, len(set(found) & set(runs[other]))))
        lines.append(f"| {num:,} | {_of_seeds(name, len(found))} | {' | '.join(cells)} |")
    told = {f"{LABELS[name]} with {num:,}": list(found.values()) for (num, name), found in rows.items()}
    flat = [row for found in told.values() for row in found]
    lines.append(
        f"\n{_sizes(Group(), flat)}; {shared(flat, 'test_problems'):,} held-out problems, 4 samples each. Differences "
        f"within seeds with 95% intervals, in bold where 0 is outside. {provenance(told)}; `bench_miniature.py`. "
        f"{correction(p)}"
    )
    return "\n".join(lines)


def _main_rows(num: int) -> dict[str, dict[int, Row]]:
    return {name: found for name, found in read_group(Group(problems=num)).items() if name in MANY_NAMES}


def _of_seeds(name: str, num: int) -> str:
    return f"{LABELS[name]}, {num} seed{'s' * (num > 1)}"


def _common_budgets(runs: Sequence[Points]) -> list[float]:
    """The early budget, and the last tenth of a million tokens that all runs reach."""
    last = math.floor(min(points["tokens"][-1] for points in runs) / 1e5) * 1e5
    return [EARLY, last] if last > EARLY else [last]


if __name__ == "__main__":
    draw()
