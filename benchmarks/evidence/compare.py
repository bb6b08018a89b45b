# SPDX-License-Identifier: Apache-2.0
"""Comparisons of runs that share a warm start: within seeds, with Student's intervals over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scipy import stats

from benchmarks.miniature.runs import Group, Points, Rows, read_group, score_at

MAIN = ("scalerl", "grpo", "dapo", "gspo")
SIZES = ("0.3M", "3M", "11M", "27M")
EARLY, MIDDLE, LATE = 0.3e6, 0.6e6, 1.8e6
"""Sampled tokens: half of the first pass over few problems, just before it ends, and the most that all recipes of the
first recording have."""
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


def p_value(differences: Sequence[float]) -> float | None:
    """That their mean is 0; None of fewer than two, or of runs that are the same."""
    if len(differences) < 2 or not any(differences):
        return None
    return float(stats.ttest_1samp(differences, 0).pvalue)


def holm(p: Mapping[Any, float]) -> dict[Any, float]:
    """p values corrected for their number (Holm 1979, doi 10.2307/4615733), smallest first."""
    corrected, highest = {}, 0.0
    for rank, key in enumerate(sorted(p, key=p.__getitem__)):
        highest = max(highest, min(1.0, p[key] * (len(p) - rank)))
        corrected[key] = highest
    return corrected


def mean_at(runs: Mapping[int, Points], budget: float) -> float | None:
    """Mean pass rate over seeds at a budget; None if one of them has none there."""
    scores = [score_at(points, budget) for points in runs.values()]
    found = [score for score in scores if score is not None]
    return statistics.fmean(found) if len(found) == len(scores) else None


def difference_text(differences: Sequence[float], num: int | None = None) -> str:
    """Mean difference with its interval, in bold where 0 is outside; and their number, if it is not ``num``."""
    if len(differences) < 2:
        return "fewer than two seeds"
    if not any(differences):
        return "the same run so far"
    mean, half = statistics.fmean(differences), half_width(differences)
    shown = f"{mean:+.3f} ± {half:.3f}"
    shown = f"**{shown}**" if abs(mean) > half else shown
    return shown if num in (None, len(differences)) else f"{shown} ({len(differences)} of {num} seeds)"


def detectable_text(differences: Sequence[float]) -> str:
    """`detectable`; empty where there is no spread."""
    return f"{detectable(differences):.3f}" if len(differences) > 1 and any(differences) else ""


def named(group: Group, names: Sequence[str] = MAIN) -> Rows:
    """Recorded rows of a group, of these recipes."""
    return {name: found for name, found in read_group(group).items() if name in names}


def common_budgets(runs: Iterable[Mapping[int, Points]]) -> list[float]:
    """The early budget, and the last tenth of a million tokens that all runs reach."""
    last = math.floor(min(points["tokens"][-1] for found in runs for points in found.values()) / 1e5) * 1e5
    return [EARLY, last] if last > EARLY else [last]
