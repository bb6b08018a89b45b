# SPDX-License-Identifier: Apache-2.0
"""Compare recipes by their curves: the paper's rule (ceiling, then steepness) and an interval-based rule beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.stats import norm
from scipy.stats import t as student

from scalerl_verl.scaling.fit.fitting import fit_points
from scalerl_verl.scaling.fit.result import CurveFit, Interval

TIE = 0.02
"""Ceilings closer than this are tied: over three runs of one recipe A varies by up to 0.015 (arXiv 2510.13786)."""
RUN_SPREAD = 0.0075
"""Standard deviation of A between runs of one recipe that differ in their seeds: half of those 0.015."""
RUN_SPREAD_DOF = 4
"""What `RUN_SPREAD` counts for beside the spread of given seeds: as three seeds of two recipes do."""


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
    """One line of a leave-one-out table: a recipe beside the reference.

    B_common: with A fixed at the mean A of all recipes tied with the reference, so that steepness can be compared;
    None for the others.
    """

    name: str
    fit: CurveFit
    delta_A: float
    tied: bool
    B_common: float | None
    B_common_interval: Interval | None


@dataclass(frozen=True)
class GroupPair:
    """One recipe against another, each run with several seeds.

    difference: mean A of the first minus that of the second, with its interval. spread: standard deviation of A between
    seeds that it comes from. winner: the one whose interval excludes 0, or None. trusted: A is identified in all runs.
    """

    first: str
    second: str
    difference: float
    difference_interval: Interval
    spread: float
    winner: str | None
    trusted: bool


def compare_pair(
    first: str, fit_1: CurveFit, second: str, fit_2: CurveFit, tie: float = TIE, spread: float = RUN_SPREAD
) -> Pair:
    """Compare two fits of the method `profile`, of one run each, whose A vary between seeds by `spread`."""
    difference = fit_1.A - fit_2.A
    interval = difference_interval(fit_1.A, fit_1.A_interval, fit_2.A, fit_2.A_interval)
    interval = widen_by_runs(difference, interval, spread, fit_1.level)
    tied = abs(difference) < tie
    common, B_1, B_2 = None, None, None
    refits: list[CurveFit] = []
    winner = None
    if tied:
        common = (fit_1.A + fit_2.A) / 2
        refits = [refit_with_A(fit, common) for fit in (fit_1, fit_2)]
        B_1, B_2 = (fit.B for fit in refits)
        close = abs(math.log(B_1 / B_2)) < 0.02
        winner = None if close else (first if B_1 > B_2 else second)
    else:
        winner = first if difference > 0 else second
    return Pair(
        first,
        second,
        difference,
        interval,
        tied,
        common,
        B_1,
        B_2,
        refits[0].B_interval if refits else None,
        refits[1].B_interval if refits else None,
        winner,
        _excludes_0(interval, first, second),
        fit_1.identified and fit_2.identified,
    )


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


def compare_groups(
    first: str, fits_1: Sequence[CurveFit], second: str, fits_2: Sequence[CurveFit], spread: float = RUN_SPREAD
) -> GroupPair:
    """Compare two recipes by fits of several seeds each.

    Raises:
        ValueError: a recipe without a fit.
    """
    if not fits_1 or not fits_2:
        raise ValueError("each recipe needs one fit or more")
    every = [*fits_1, *fits_2]
    z = float(norm.ppf(0.5 + every[0].level / 2))
    own = float(np.mean([((fit.A_interval[1] - fit.A_interval[0]) / 2 / z) ** 2 for fit in every]))
    A_1, A_2 = [fit.A for fit in fits_1], [fit.A for fit in fits_2]
    difference, interval, seen = group_difference(A_1, A_2, own, every[0].level, spread)
    winner = _excludes_0(interval, first, second)
    return GroupPair(first, second, difference, interval, seen, winner, all(fit.identified for fit in every))


def group_difference(
    A_1: Sequence[float], A_2: Sequence[float], own_variance: float, level: float, spread: float = RUN_SPREAD
) -> tuple[float, Interval, float]:
    """Difference of the means of ceilings over seeds, its interval, and the standard deviation between seeds.

    The variance between seeds is that of the seeds given, pooled, beside the one expected: `spread`^2 and what the
    fits do not know, `own_variance`, which count `RUN_SPREAD_DOF` degrees of freedom (a scaled inverse chi-square
    prior, so that the interval is a t interval). Three seeds alone say little about their spread.
    """
    squares = sum(float(np.sum((np.asarray(A) - np.mean(A)) ** 2)) for A in (A_1, A_2))
    dof = len(A_1) + len(A_2) - 2 + RUN_SPREAD_DOF
    variance = (RUN_SPREAD_DOF * (spread**2 + own_variance) + squares) / dof
    half = float(student.ppf(0.5 + level / 2, dof)) * math.sqrt(variance * (1 / len(A_1) + 1 / len(A_2)))
    difference = float(np.mean(A_1) - np.mean(A_2))
    return difference, (difference - half, difference + half), math.sqrt(variance)


def refit_with_A(fit: CurveFit, A: float) -> CurveFit:
    """The same data and settings with A fixed."""
    errors = "relative" if fit.variance is None else "absolute"
    R0 = fit.R0 if fit.R0_interval is None else None
    return fit_points(fit.points, R0=R0, level=fit.level, errors=errors, fixed_A=A)


def compare_all(fits: Mapping[str, CurveFit], tie: float = TIE) -> tuple[Pair, ...]:
    """Every pair, in the order of the names given.

    Raises:
        ValueError: fewer than two recipes.
    """
    if len(fits) < 2:
        raise ValueError(f"{len(fits)} recipe given; a comparison needs two or more")
    return tuple(compare_pair(a, fits[a], b, fits[b], tie) for a, b in combinations(fits, 2))


def leave_one_out(fits: Mapping[str, CurveFit], reference: str, tie: float = TIE) -> tuple[Row, ...]:
    """Every recipe against the reference, best A first, the reference on top.

    Raises:
        ValueError: the reference is none of the recipes.
    """
    if reference not in fits:
        raise ValueError(f"reference {reference!r} is none of the recipes: {', '.join(fits)}")
    base = fits[reference].A
    tied = {name for name, fit in fits.items() if abs(fit.A - base) < tie}
    common = sum(fits[name].A for name in tied) / len(tied)
    rows = []
    for name, fit in fits.items():
        refit = refit_with_A(fit, common) if name in tied else None
        rows.append(
            Row(
                name,
                fit,
                fit.A - base,
                name in tied,
                refit.B if refit else None,
                refit.B_interval if refit else None,
            )
        )
    return tuple(sorted(rows, key=lambda row: (row.name != reference, -row.fit.A)))
