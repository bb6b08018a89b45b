# SPDX-License-Identifier: Apache-2.0
"""Compare recipes by their curves: the paper's rule (ceiling, then steepness) and an interval-based rule beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from scalerl_verl.scaling.fit.fitting import fit_points
from scalerl_verl.scaling.fit.result import CurveFit, Interval

TIE = 0.02
"""Ceilings closer than this are tied: over three runs of one recipe A varies by up to 0.015 (arXiv 2510.13786)."""


@dataclass(frozen=True)
class Pair:
    """One recipe against another.

    difference: A of the first minus A of the second, its interval from those of both.
    paper_winner: by the paper's rule, None if tied on A and on B too (to 2%). tied: their A differ by less than 0.02.
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


def compare_pair(first: str, fit_1: CurveFit, second: str, fit_2: CurveFit, tie: float = TIE) -> Pair:
    """Compare two fits of the method `profile`."""
    difference = fit_1.A - fit_2.A
    interval = difference_interval(fit_1.A, fit_1.A_interval, fit_2.A, fit_2.A_interval)
    tied = abs(difference) < tie
    common, B_1, B_2 = None, None, None
    refits: list[CurveFit] = []
    if tied:
        common = (fit_1.A + fit_2.A) / 2
        refits = [refit_with_A(fit, common) for fit in (fit_1, fit_2)]
        B_1, B_2 = (fit.B for fit in refits)
        close = abs(math.log(B_1 / B_2)) < 0.02
        winner = None if close else (first if B_1 > B_2 else second)
    else:
        winner = first if difference > 0 else second
    clear = None
    if interval[0] > 0:
        clear = first
    elif interval[1] < 0:
        clear = second
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
        clear,
        fit_1.identified and fit_2.identified,
    )


def difference_interval(A_1: float, interval_1: Interval, A_2: float, interval_2: Interval) -> Interval:
    """Interval of A_1 - A_2 from those of both (MOVER, Zou and Donner 2008), which need not be symmetric."""
    low = math.hypot(A_1 - interval_1[0], interval_2[1] - A_2)
    high = math.hypot(interval_1[1] - A_1, A_2 - interval_2[0])
    return A_1 - A_2 - low, A_1 - A_2 + high


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
