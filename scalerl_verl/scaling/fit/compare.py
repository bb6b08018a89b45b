# SPDX-License-Identifier: Apache-2.0
"""Compare recipes by their curves: the paper's rule (ceiling, then steepness) and an interval-based rule beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from scipy.stats import norm
from scipy.stats import t as student

from scalerl_verl.scaling.fit.fitting import fit_points
from scalerl_verl.scaling.fit.groups import RUN_SPREAD, GroupFit, own_variance, pool
from scalerl_verl.scaling.fit.result import CurveFit, Interval

TIE = 0.02
"""Ceilings closer than this are tied: over three runs of one recipe A varies by up to 0.015 (arXiv 2510.13786)."""
CLOSE_B = 0.02
"""Steepness closer than this, relatively, is tied, too."""


@dataclass(frozen=True)
class Pair:
    """One recipe against another.

    difference: A of the first minus A of the second, its interval from those of both and from how much runs differ.
    paper_winner: by the paper's rule, None if tied on A and on B too (to 2%); it knows no noise of B, so that a tie
    mostly has one. tied: their A differ by less than 0.02.
    common_A, B_first, B_second: the refits with A fixed at the mean, if tied; intervals of B beside them.
    interval_winner: the one whose interval of the difference excludes 0; None if it does not.
    trusted: A is identified in both.
    """

    first: str
    second: str
    difference: float
    difference_interval: Interval
    tied: bool
    common_A: float | None
    B_first: float | None
    B_second: float | None
    B_first_interval: Interval | None
    B_second_interval: Interval | None
    paper_winner: str | None
    interval_winner: str | None
    trusted: bool

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return dict(vars(self))


@dataclass(frozen=True)
class Row:
    """One line of a leave-one-out table: a recipe, a run or a group of them, beside the reference.

    B_common: with A fixed at the mean A of all recipes tied with the reference, so that steepness can be compared;
    None for the others.
    """

    name: str
    fit: CurveFit | GroupFit
    delta_A: float
    tied: bool
    B_common: float | None
    B_common_interval: Interval | None


@dataclass(frozen=True)
class GroupPair(Pair):
    """One recipe against another, each run with several seeds; the fields of `Pair` between their means.

    spread: standard deviation of A between seeds that the interval comes from, pooled over both (`group_difference`).
    num_first, num_second: seeds.
    """

    spread: float
    num_first: int
    num_second: int


def compare_pair(
    first: str, fit_1: CurveFit, second: str, fit_2: CurveFit, tie: float = TIE, spread: float = RUN_SPREAD
) -> Pair:
    """Compare two fits of the method `profile`, of one run each, whose A vary between seeds by `spread`."""
    difference = fit_1.A - fit_2.A
    interval = difference_interval(fit_1.A, fit_1.A_interval, fit_2.A, fit_2.A_interval)
    interval = widen_by_runs(difference, interval, spread, fit_1.level)
    return Pair(**_by_both_rules(first, fit_1, second, fit_2, tie, difference, interval))


def _by_both_rules(
    first: str,
    one: CurveFit | GroupFit,
    second: str,
    two: CurveFit | GroupFit,
    tie: float,
    difference: float,
    interval: Interval,
) -> dict[str, Any]:
    """The fields of a `Pair`."""
    tied = abs(difference) < tie
    common, B_1, B_2, of_B_1, of_B_2 = None, None, None, None, None
    winner: str | None = first if difference > 0 else second
    if tied:
        common = (one.A + two.A) / 2
        (B_1, of_B_1), (B_2, of_B_2) = (steepness_at(recipe, common) for recipe in (one, two))
        close = abs(math.log(B_1 / B_2)) < CLOSE_B
        winner = None if close else (first if B_1 > B_2 else second)
    return {
        "first": first,
        "second": second,
        "difference": difference,
        "difference_interval": interval,
        "tied": tied,
        "common_A": common,
        "B_first": B_1,
        "B_second": B_2,
        "B_first_interval": of_B_1,
        "B_second_interval": of_B_2,
        "paper_winner": winner,
        "interval_winner": _excludes_0(interval, first, second),
        "trusted": one.identified and two.identified,
    }


def _excludes_0(interval: Interval, first: str, second: str) -> str | None:
    return first if interval[0] > 0 else second if interval[1] < 0 else None


def difference_interval(A_1: float, interval_1: Interval, A_2: float, interval_2: Interval) -> Interval:
    """Interval of A_1 - A_2 from those of both (MOVER, Zou and Donner 2008), which need not be symmetric."""
    low = math.hypot(A_1 - interval_1[0], interval_2[1] - A_2)
    high = math.hypot(interval_1[1] - A_1, A_2 - interval_2[0])
    return A_1 - A_2 - low, A_1 - A_2 + high


def widen_by_runs(difference: float, interval: Interval, spread: float, level: float) -> Interval:
    """The interval of a difference of two runs as one of two recipes, whose runs have A with a standard deviation."""
    runs = float(norm.ppf(0.5 + level / 2)) * spread * math.sqrt(2)
    return difference - math.hypot(difference - interval[0], runs), difference + math.hypot(
        interval[1] - difference, runs
    )


def compare_groups(one: GroupFit, two: GroupFit, tie: float = TIE, spread: float = RUN_SPREAD) -> GroupPair:
    """Compare two recipes of several seeds each: the paper's rule between their means, and the interval rule."""
    fits_1, fits_2 = list(one.fits.values()), list(two.fits.values())
    difference, interval, seen = group_difference(
        [fit.A for fit in fits_1],
        [fit.A for fit in fits_2],
        own_variance([*fits_1, *fits_2]),
        one.level,
        spread,
    )
    fields = _by_both_rules(one.name, one, two.name, two, tie, difference, interval)
    return GroupPair(**fields, spread=seen, num_first=len(fits_1), num_second=len(fits_2))


def group_difference(
    A_1: Sequence[float], A_2: Sequence[float], own: float, level: float, spread: float = RUN_SPREAD
) -> tuple[float, Interval, float]:
    """Difference of mean ceilings over seeds, its interval, and the standard deviation between seeds by `pool`."""
    variance, dof = pool([A_1, A_2], own, spread)
    half = float(student.ppf(0.5 + level / 2, dof)) * math.sqrt(variance * (1 / len(A_1) + 1 / len(A_2)))
    difference = float(np.mean(A_1) - np.mean(A_2))
    return difference, (difference - half, difference + half), math.sqrt(variance)


def steepness_at(recipe: CurveFit | GroupFit, A: float) -> tuple[float, Interval | None]:
    """B with A fixed, and its interval; over seeds the geometric mean, with the t interval of their logarithms."""
    refits = [refit_with_A(fit, A) for fit in (recipe.fits.values() if isinstance(recipe, GroupFit) else [recipe])]
    if len(refits) == 1:
        return refits[0].B, refits[0].B_interval
    logs = np.log([refit.B for refit in refits])
    half = float(student.ppf(0.5 + recipe.level / 2, len(logs) - 1)) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    mean = float(logs.mean())
    return math.exp(mean), (math.exp(mean - half), math.exp(mean + half))


def refit_with_A(fit: CurveFit, A: float) -> CurveFit:
    """The same data and settings with A fixed."""
    errors = "relative" if fit.variance is None else "absolute"
    R0 = fit.R0 if fit.R0_interval is None else None
    return fit_points(fit.points, R0=R0, level=fit.level, errors=errors, fixed_A=A)


def compare_all(recipes: Mapping[str, CurveFit] | Mapping[str, GroupFit], tie: float = TIE) -> tuple[Pair, ...]:
    """Every pair, in the order of the names given.

    Raises:
        ValueError: fewer than two recipes.
    """
    if len(recipes) < 2:
        raise ValueError(f"{len(recipes)} recipe given; a comparison needs two or more")
    pairs: list[Pair] = []
    for first, second in combinations(recipes, 2):
        one, two = recipes[first], recipes[second]
        if isinstance(one, GroupFit) and isinstance(two, GroupFit):
            pairs.append(compare_groups(one, two, tie))
        elif isinstance(one, CurveFit) and isinstance(two, CurveFit):
            pairs.append(compare_pair(first, one, second, two, tie))
    return tuple(pairs)


def leave_one_out(
    recipes: Mapping[str, CurveFit] | Mapping[str, GroupFit], reference: str, tie: float = TIE
) -> tuple[Row, ...]:
    """Every recipe against the reference, best A first, the reference on top.

    Raises:
        ValueError: the reference is none of the recipes.
    """
    if reference not in recipes:
        raise ValueError(f"reference {reference!r} is none of the recipes: {', '.join(recipes)}")
    base = recipes[reference].A
    tied = {name for name, recipe in recipes.items() if abs(recipe.A - base) < tie}
    common = sum(recipes[name].A for name in tied) / len(tied)
    rows = []
    for name, recipe in recipes.items():
        B, interval = steepness_at(recipe, common) if name in tied else (None, None)
        rows.append(Row(name, recipe, recipe.A - base, name in tied, B, interval))
    return tuple(sorted(rows, key=lambda row: (row.name != reference, -row.fit.A)))
