# SPDX-License-Identifier: Apache-2.0
"""Fit Eq. 1: the paper's grid, or (default) the global weighted fit with profile likelihood intervals."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import ArrayLike

from scalerl_verl.scaling.fit import correlation, paper_grid, profile, solver, verdicts
from scalerl_verl.scaling.fit.late_trend import bound_late_rise, find_late_trend
from scalerl_verl.scaling.fit.paper_grid import Grid
from scalerl_verl.scaling.fit.points import FitRefused, Points, check_count, check_R0
from scalerl_verl.scaling.fit.result import CurveFit, Interval
from scalerl_verl.scaling.fit.solver import Problems

METHODS = ("profile", "paper")
ERRORS = ("relative", "absolute")


def fit_curve(
    compute: ArrayLike,
    score: ArrayLike,
    stderr: ArrayLike | None = None,
    *,
    R0: float | None = None,
    method: str = "profile",
    warm_up: float = 0.0,
    level: float = 0.95,
    errors: str = "relative",
    grid: Grid | None = None,
    fixed_A: float | None = None,
) -> CurveFit:
    """Fit the compute-performance curve of one run, with confidence intervals and a verdict on the ceiling A.

        R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

    Args:
        compute: N distinct values >= 0, in any order and any unit. A point at compute 0 is the score before training.
        score: N mean pass rates, from 0 to 1.
        stderr: N standard errors of the scores; a point has the weight 1 / stderr^2. None: equal weights.
        R0: score at zero compute, from 0 to 0.99, taken as exact; a point at compute 0 is then left out. None: R0 is
            fitted, and a point at compute 0 is an observation of it like any other (method "paper" takes it as exact).
        method: "profile": the global optimum of bounded, weighted least squares, with profile-likelihood intervals.
            "paper": the paper's grid search over A and C_mid, unweighted.
        warm_up: points with 0 < compute < warm_up are left out (the paper leaves out the first 1,500 GPU-hours).
        level: confidence level of the intervals, from 0.5 to below 1.
        errors: "relative": `stderr` gives weights only, and the noise is estimated from the residuals. "absolute":
            `stderr` is the noise itself; use it for few points whose errors are known.
        grid: grid of method "paper". None: the paper's.
        fixed_A: ceiling to keep fixed (method "profile"); `compare` uses it for recipes that are tied on A.

    Returns:
        CurveFit: `A`, `B`, `C_mid` (in the unit of `compute`) and `R0`, each with an interval such as `A_interval`;
        `verdict`, which is "identified" or the reason not to trust A; `explain()` says it in a sentence, and
        `curve(compute)` evaluates the fit.

    Raises:
        FitRefused: the data cannot be fitted (a ValueError): too few points, a constant score, values out of range.
        ValueError: an argument has a value that is not allowed.

    Source: arXiv 2510.13786, Eq. 1.
    """
    points = Points.make(compute, score, stderr)
    return fit_points(
        points, R0=R0, method=method, warm_up=warm_up, level=level, errors=errors, grid=grid, fixed_A=fixed_A
    )


def fit_points(
    points: Points,
    *,
    R0: float | None = None,
    method: str = "profile",
    warm_up: float = 0.0,
    level: float = 0.95,
    errors: str = "relative",
    grid: Grid | None = None,
    fixed_A: float | None = None,
) -> CurveFit:
    """`fit_curve` for checked points."""
    _check_arguments(method, level, errors, grid, fixed_A)
    before = points.trained
    if not warm_up >= 0:
        raise ValueError(f"warm_up={warm_up:g} must be 0 or more: compute below which points are left out")
    if warm_up > 0:
        kept = points.after(warm_up)
        if not len(kept.trained):
            raise FitRefused("too_few_points", f"no point has a compute of {warm_up:g} or more (the warm-up cut).")
        points = kept
    if R0 is not None:
        check_R0(R0)
    elif method == "paper":  # takes the score before training as exact
        R0 = points.start
    if R0 is not None:
        points = points.trained
    num_parameters = 3 + (R0 is None) - (fixed_A is not None)
    check_count(points, num_parameters)
    variance = points.unit_variance() if errors == "absolute" else None
    if method == "paper":
        fit, at_bounds = _fit_by_grid(points, R0, level, variance, grid or Grid())
        late = None
    else:
        fit, at_bounds = _fit_profile(points, R0, level, variance, fixed_A)
        late = _fit_late(points, R0, level, variance, num_parameters) if fixed_A is None else None
    # A cell on the edge of its grid is no least-squares fit to look beside.
    is_best = method == "profile" or not at_bounds
    end = (pose(points, R0), fit.theta(), num_parameters)
    trend, unseen = (find_late_trend(*end), bound_late_rise(*end)) if is_best else (None, None)
    return dataclasses.replace(fit, troubles=verdicts.find_troubles(fit, at_bounds, late, trend, unseen, before))


def _check_arguments(method: str, level: float, errors: str, grid: Grid | None, fixed_A: float | None) -> None:
    if method not in METHODS:
        raise ValueError(f"method={method!r}: use one of {', '.join(METHODS)}")
    if errors not in ERRORS:
        raise ValueError(f"errors={errors!r}: use one of {', '.join(ERRORS)}")
    if not 0.5 <= level < 1:
        raise ValueError(f"level={level!r} must lie between 0.5 and 1, such as 0.95")
    if method != "paper" and grid is not None:
        raise ValueError("a grid is for method='paper'; the default method searches without one")
    if fixed_A is not None and (method == "paper" or not 0 < fixed_A <= 1):
        raise ValueError(f"fixed_A={fixed_A!r} must lie between 0 and 1 and needs method='profile'")


def pose(points: Points, R0: float | None) -> Problems:
    """One least-squares problem for checked points."""
    low, high = solver.make_bounds(points.trained.compute, R0)
    return Problems(points.log_compute[None], points.score[None], points.weights()[None], low, high)


def _fit_profile(
    points: Points, R0: float | None, level: float, variance: float | None, fixed_A: float | None
) -> tuple[CurveFit, tuple[str, ...]]:
    problems = pose(points, R0)
    low, high = problems.low, problems.high
    if fixed_A is not None:
        low[solver.A] = high[solver.A] = fixed_A
        high[solver.R0] = min(high[solver.R0], fixed_A)
    theta, sums = solver.solve(problems, R0 is not None)
    num_parameters = 3 + (R0 is None) - (fixed_A is not None)
    correlated = correlation.estimate(problems, theta[0], num_parameters, variance is not None)
    widening = correlated.widening(np.eye(4), level)[None]
    found = profile.find_intervals(problems, theta, sums, R0 is not None, level, variance, widening=widening)
    A, B, C_mid, fitted_R0 = _natural(found.theta[0])
    ends = found.ends[0]
    fit = CurveFit(
        A,
        B,
        C_mid,
        fitted_R0,
        _pair(ends[solver.A]),
        _pair(np.exp(ends[solver.LOG_B])),
        _pair(np.exp(ends[solver.LOG_C_MID])),
        None if R0 is not None else _pair(ends[solver.R0]),
        level,
        float(found.sums[0]),
        len(points.trained),
        num_parameters,
        "profile",
        (),
        variance,
        fixed_A is not None,
        points,
        correlation=correlated,
    )
    return fit, _bounds_met(fit, low, high)


def _natural(theta: np.ndarray) -> tuple[float, float, float, float]:
    return float(theta[0]), math.exp(theta[1]), math.exp(theta[2]), float(theta[3])


def _pair(ends: np.ndarray) -> Interval:
    return float(ends[0]), float(ends[1])


def _bounds_met(fit: CurveFit, low: np.ndarray, high: np.ndarray) -> tuple[str, ...]:
    """Best values of B and C_mid on a bound; A's upper bound has a verdict of its own."""
    met = []
    if not fit.fixed_A and fit.A <= fit.R0 + verdicts.A_EDGE:
        met.append(f"the best ceiling, {fit.A:.3f}, is no higher than R0 = {fit.R0:.3f}: the score does not rise.")
    for name, value, column in (("B", fit.B, solver.LOG_B), ("C_mid", fit.C_mid, solver.LOG_C_MID)):
        place = math.log(value)
        if place <= low[column] + 1e-6 or (name == "C_mid" and place >= high[column] - 1e-6):
            ends = np.exp([low[column], high[column]])
            met.append(
                f"the best {name}, {value:.4g}, lies on the edge of its bounds ({ends[0]:.4g} to {ends[1]:.4g})."
            )
    return tuple(met)


def _fit_late(
    points: Points, R0: float | None, level: float, variance: float | None, num_parameters: int
) -> tuple[CurveFit, int] | None:
    """The fit without the early points and their number; None where there are too few points to try."""
    late = verdicts.split_early(points, num_parameters)
    if late is None:
        return None
    # The weights stay those of all points: rescaling them would make the two sums of squares incomparable.
    problems = pose(points, R0)
    part = Problems(problems.x[:, late], problems.y[:, late], problems.w[:, late], problems.low, problems.high)
    theta, sums = solver.solve(part, R0 is not None)
    A, B, C_mid, fitted_R0 = _natural(theta[0])
    nowhere = (math.nan, math.nan)
    kept = points.select(late)
    fit = CurveFit(
        A, B, C_mid, fitted_R0, nowhere, nowhere, nowhere, None, level, float(sums[0]), len(kept.trained),
        num_parameters, "profile", (), variance, False, kept,
    )  # fmt: skip
    return fit, int((~late).sum())


def _fit_by_grid(
    points: Points, R0: float | None, level: float, variance: float | None, grid: Grid
) -> tuple[CurveFit, tuple[str, ...]]:
    try:
        best = paper_grid.search(points.compute, points.score, R0, grid)
    except ValueError as error:
        raise FitRefused("bad_grid", str(error)) from error
    num_parameters = 3 + (R0 is None)
    # The table is unweighted, as the paper's fit is; a known variance is that of an average point.
    plain = None if variance is None or points.stderr is None else float(np.mean(points.stderr**2))
    theta = np.array([best.A, math.log(best.B), math.log(best.C_mid), best.R0])
    correlated = correlation.estimate(pose(points, R0), theta, num_parameters, variance is not None)
    excess = float(profile.allowed_excess(np.array([best.sse]), len(points), num_parameters, level, plain)[0])
    limit = best.sse + excess * float(correlated.widening(np.eye(4)[:3], level).max()) ** 2
    i, j = np.nonzero(best.sums_AC <= limit)
    weighted = paper_grid.sum_squares(
        points.compute, points.score, points.weights(), best.A, best.B, best.C_mid, best.R0
    )
    fit = CurveFit(
        best.A,
        best.B,
        best.C_mid,
        best.R0,
        _widen(grid.A, i),
        (float(best.B_AC[i, j].min()), float(best.B_AC[i, j].max())),
        _widen(grid.C_mid, j),
        None,
        level,
        weighted,
        len(points),
        num_parameters,
        "paper",
        (),
        variance,
        False,
        points,
        best,
        correlated,
    )
    return fit, _edges_met(fit, grid)


def _widen(values: np.ndarray, inside: np.ndarray) -> Interval:
    """From the last value below to the first above those that fit: between them the grid says nothing."""
    return float(values[max(inside.min() - 1, 0)]), float(values[min(inside.max() + 1, len(values) - 1)])


def _edges_met(fit: CurveFit, grid: Grid) -> tuple[str, ...]:
    met = []
    for name, value, values in (("A", fit.A, grid.A), ("C_mid", fit.C_mid, grid.C_mid)):
        if value in (values[0], values[-1]):
            met.append(
                f"the best {name}, {value:.4g}, lies on the edge of the grid ({values[0]:.4g} to {values[-1]:.4g}); "
                "widen the grid."
            )
    for name, interval, values in (
        ("A", fit.A_interval, grid.A),
        ("C_mid", fit.C_mid_interval, grid.C_mid),
    ):
        if not met and (interval[0] <= values[0] or interval[1] >= values[-1]):
            met.append(
                f"values of {name} up to the edge of the grid ({values[0]:.4g} to {values[-1]:.4g}) fit about equally "
                "well: its interval is cut off there; widen the grid."
            )
    return tuple(met)
