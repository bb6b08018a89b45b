# SPDX-License-Identifier: Apache-2.0
"""Tables of the miniature's recorded curves: recipes beside ScaleRL, paired by seed.

python -m benchmarks.evidence.recipes    draw docs/evidence*.png anew

Seeds share a warm start across recipes, so differences are taken within a seed; intervals are Student's over seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scipy import stats

from benchmarks.evidence.fits import LATE, draw_all
from benchmarks.miniature.runs import (
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

MAIN = ("scalerl", "grpo", "dapo", "gspo")
EARLY, MIDDLE = 0.3e6, 0.6e6
"""Sampled tokens: half of the first pass over the problems, and just before it ends."""
POWER, LEVEL = 0.8, 0.95


def half_width(differences: Sequence[float]) -> float:
    """Of the interval of their mean."""
    degrees = len(differences) - 1
    return float(stats.t.ppf((1 + LEVEL) / 2, degrees)) * statistics.stdev(differences) / math.sqrt(len(differences))


def geometric(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of two ratios or more, and both ends of its interval."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, half = statistics.fmean(logs), half_width(logs)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


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
    if len(p) < 2:
        return "One comparison." if p else "No comparison of two seeds or more."
    stay: dict[float, list[str]] = {}
    for (label, budget), value in holm(p).items():
        if value < 1 - LEVEL:
            stay.setdefault(budget, []).append(label)
    told = "; ".join(f"at {budget / 1e6:g}M {', '.join(labels)}" for budget, labels in sorted(stay.items()))
    return f"{len(p)} comparisons; by Holm's correction for so many, what stays below .05 is: {told or 'nothing'}."


def comparison_table(
    group: Group | None = None,
    budgets: Sequence[float] = (EARLY, MIDDLE, LATE),
    reference: str = REFERENCE,
    names: Sequence[str] = tuple(LABELS),
) -> str:
    """One line a recipe: pass rate at the budgets and the paired difference to the reference, with its power.

    Recipes that were not run as far as one of the budgets are left out.
    """
    group = group or Group()
    rows = {name: found for name, found in read_group(group).items() if name in (*names, reference)}
    if reference not in rows:
        return "Not recorded yet: `python -m benchmarks.miniature.bench`."
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
            add_p(p, (LABELS[name], budget), differences)
            num = len(set(runs[name]) & set(runs[reference]))
            cells.append(f"{score:.3f} | {with_power(differences, num, name == reference)}")
        if any("not run" not in cell for cell in cells):
            told[LABELS[name]] = list(rows[name].values())
            lines.append(f"| {_counted(name, rows, reference)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{footer(LABELS[reference], told)} {correction(p)}"])


def mean_at(runs: Mapping[int, Points], budget: float) -> float | None:
    """Mean pass rate over seeds at a budget; None if one of them has none there."""
    scores = [score_at(points, budget) for points in runs.values()]
    found = [score for score in scores if score is not None]
    return statistics.fmean(found) if len(found) == len(scores) else None


def add_p(p: dict[tuple[str, float], float], key: tuple[str, float], differences: Sequence[float]) -> None:
    if len(differences) > 1 and any(differences):
        p[key] = float(stats.ttest_1samp(differences, 0).pvalue)


def _counted(name: str, rows: Mapping[str, Mapping[int, Row]], reference: str) -> str:
    """A recipe's label, with its number of seeds where that is not the reference's."""
    num = len(rows[name])
    return LABELS[name] if num == len(rows[reference]) else f"{LABELS[name]} ({num} seed{'s' * (num > 1)})"


def with_power(differences: Sequence[float], num: int, is_reference: bool) -> str:
    if is_reference:
        return " | "
    power = f"{detectable(differences):.3f}" if len(differences) > 1 and any(differences) else ""
    return f"{of_pairs(differences, num)} | {power}"


def of_pairs(differences: Sequence[float], num: int) -> str:
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


def footer(reference: str, rows: Mapping[str, Sequence[Row]]) -> str:
    """Where the numbers of one group's labelled rows come from."""
    flat = [row for found in rows.values() for row in found]
    seeds = len({row["case"]["seed"] for row in flat})
    return (
        f"{setting_text(flat)}; {shared(flat, 'test_problems'):,} held-out problems, 4 samples each. Differences to "
        f"*{reference}* within seeds with 95% intervals, in bold where 0 is outside; *detectable*: what {seeds} seeds "
        f"of this spread show in 80% of tries. {provenance(rows)}; `benchmarks.miniature.bench`."
    )


def setting_text(rows: Sequence[Row]) -> str:
    """What runs of one size have in common; k and the number of training problems only where all have the same."""
    seeds = len({row["case"]["seed"] for row in rows})
    k, problems = ({row["case"][name] for row in rows} for name in ("k", "train_problems"))
    text = (
        f"{shared(rows, 'size')} parameters, {seeds} seeds, each with a warm start of its own that all recipes share; "
        f"k{f' = {min(k)}' if len(k) == 1 else ''} optimizer steps of 32 x 16 responses on a generated batch, "
        f"learning rate {shared(rows, 'lr'):g}"
    )
    return f"{text}; {min(problems):,} training problems" if len(problems) == 1 else text


if __name__ == "__main__":
    draw_all()
