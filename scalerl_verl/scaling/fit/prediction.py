# SPDX-License-Identifier: Apache-2.0
"""What a fit says about scores elsewhere: predictions with intervals, compute to reach a score, worth of going on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import norm
from scipy.stats import t as student

from scalerl_verl.scaling.fit import solver
from scalerl_verl.scaling.fit.curve import Array, Mask, invert, rise
from scalerl_verl.scaling.fit.fitting import pose
from scalerl_verl.scaling.fit.points import FitRefused
from scalerl_verl.scaling.fit.profile import allowed_excess
from scalerl_verl.scaling.fit.result import CurveFit, Interval
from scalerl_verl.scaling.fit.solver import Problems

PULLS = (float(np.log(1e-12)), float(np.log(1e4)))
"""Range of the log of the weight of the pseudo-point that pulls the curve at one place."""
MAX_STEPS = 24
BAND_POINTS = 40, 24, 120
"""Of a band for a picture: at least, for each decade, at most."""
JUMP = 0.01  # of the log of the pull: a smaller gap between inside and outside of the limit is a jump
HALVINGS = 14
REFINEMENTS, REFINED_POINTS = 2, 12
"""Of the grid around a crossing: from steps of 16% and more to .2%, as good as the ends of the band."""


@dataclass(frozen=True)
class Prediction:
    """Scores at [K] compute values with profile likelihood intervals of the curve itself (not of a new noisy point)."""

    compute: Array
    score: Array
    low: Array
    high: Array
    level: float


@dataclass(frozen=True)
class Reach:
    """Compute at which the curve reaches a score; infinite where it never does. low, high: interval at `level`."""

    score: float
    compute: float
    low: float
    high: float
    level: float


@dataclass(frozen=True)
class Gain:
    """What going on from `start` to `stop` is worth.

    gain: expected rise of the score, low, high: its interval. per_unit: gain / (stop - start), in score per unit of
    compute. marginal: slope of the curve at `start`, per unit of compute. ceiling_share: of A - R0, reached at stop.
    """

    start: float
    stop: float
    gain: float
    low: float
    high: float
    per_unit: float
    marginal: float
    ceiling_share: float


def predict(fit: CurveFit, compute: ArrayLike) -> Prediction:
    """Predict the score at `compute` ([K], positive), inside or beyond the data.

    The interval holds every score through which a curve passes that fits the data nearly as well as the best one
    (profile likelihood: it need not be symmetric, and opens up where the data say nothing).

    Raises:
        ValueError: a compute value that is not positive.
    """
    at = np.atleast_1d(np.asarray(compute, dtype=np.float64))
    if at.ndim != 1 or not (np.isfinite(at).all() and (at > 0).all()):
        raise ValueError(f"compute must be positive numbers to predict at, got {at.tolist()[:5]}")
    centre = fit.curve(at)
    ends = _band(fit, np.log(at), centre)
    return Prediction(at, centre, ends[:, 0], ends[:, 1], fit.level)


def _band(fit: CurveFit, log_at: Array, centre: Array) -> Array:
    """Ends of the interval at every place, [K, 2].

    The curve is pulled up (or down) at one place by a pseudo-point one unit of score away. However hard the pull, what
    results has the least sum of squares of all curves through its score there: it lies on the profile. So the search is
    for the pull that raises the sum of squares to the limit. Where the profile is not convex no pull does: what results
    jumps over the limit, and `_halve` searches the gap.
    """
    fixed_R0 = fit.R0_interval is None
    problem = pose(fit.points, fit.R0 if fixed_R0 else None)
    if fit.fixed_A:
        problem.low[solver.A] = problem.high[solver.A] = fit.A
    sums = float(problem.sums(fit.theta()[None])[0])
    limits = _limits(fit, problem, log_at, sums)
    place, side = (axis.ravel() for axis in np.indices((len(log_at), 2)))
    num, limit = len(place), limits[place]
    free = np.array([not fit.fixed_A, True, True, not fixed_R0])
    warm = np.repeat(fit.theta()[None], num, axis=0)
    target = centre[place] + np.where(side == 0, -1.0, 1.0)
    x_JN = np.concatenate([np.repeat(problem.x, num, axis=0), log_at[place, None]], axis=1)
    y_JN = np.concatenate([np.repeat(problem.y, num, axis=0), target[:, None]], axis=1)
    w_JN = np.concatenate([np.repeat(problem.w, num, axis=0), np.zeros((num, 1))], axis=1)
    pull = _first_pull(fit, problem, log_at, limits, free)[place]
    weak, strong = np.full(num, PULLS[0]), np.full(num, np.nan)
    outer, beyond, missed = np.zeros((num, 4)), np.full(num, np.nan), np.ones(num, dtype=bool)
    ends, active = centre[place].copy(), np.arange(num)
    for _ in range(MAX_STEPS):
        w_JN[active, -1] = np.exp(pull[active])
        part = Problems(x_JN[active], y_JN[active], w_JN[active], problem.low, problem.high)
        theta, _ = solver.minimise(part, warm[active], free)
        rows = np.zeros(len(active), dtype=int)
        excess = np.maximum(problem.take(rows).sums(theta) - sums, limit[active] * 1e-12)
        off = 0.5 * np.log(
            excess / limit[active]
        )  # log of the root of the deviance: close to linear in the log of the pull
        inside = off <= 0
        # Inside the limit the way so far counts; what lies outside is a worse start than what lies inside.
        warm[active[inside]] = theta[inside]
        reached = _scores(theta, log_at[place[active]])
        ends[active[inside]] = reached[inside]
        weak[active[inside]], strong[active[~inside]] = pull[active[inside]], pull[active[~inside]]
        outer[active[~inside]], beyond[active[~inside]] = theta[~inside], reached[~inside]
        done = (np.abs(off) < 0.01) | (inside & (pull[active] >= PULLS[1]))
        ends[active[done]] = reached[done]
        there = pull[active] - np.clip(off, -4.0, 4.0)
        upper = np.where(np.isnan(strong[active]), PULLS[1], strong[active])
        inner = np.where(np.isnan(strong[active]), there, np.clip(there, weak[active] + 1e-3, upper - 1e-3))
        between = (inner <= weak[active]) | (inner >= upper)
        pull[active] = np.where(
            between & ~np.isnan(strong[active]), (weak[active] + upper) / 2, np.minimum(inner, upper)
        )
        missed[active[done]] = False
        active = active[~done & ~(strong[active] - weak[active] < JUMP)]
        if not len(active):
            break
    gaps = np.flatnonzero(missed & ~np.isnan(beyond))
    if len(gaps):
        part = Problems(x_JN[gaps], y_JN[gaps], w_JN[gaps], problem.low, problem.high)
        ends[gaps] = _halve(part, free, (warm[gaps], outer[gaps]), (ends[gaps], beyond[gaps]), sums + limit[gaps])
    return ends.clip(0.0, 1.0).reshape(-1, 2)


def _halve(part: Problems, free: Mask, starts: tuple[Array, Array], gap: tuple[Array, Array], allowed: Array) -> Array:
    """Scores at the limit, [J], between one inside and one outside of it: the curve is held at the middle of the gap.

    part: data and, last, the place where the curve is held. starts: theta of both ends. gap: scores of both ends.
    allowed: sums of squares of the data at the limit, [J].
    """
    inner, outer = gap
    y_JN, w_JN = part.y.copy(), part.w.copy()
    w_JN[:, -1] = np.exp(PULLS[1])
    for _ in range(HALVINGS):
        y_JN[:, -1] = middle = (inner + outer) / 2
        held = Problems(part.x, y_JN, w_JN, part.low, part.high)
        # Both ends as starts: in between lies the way from one valley into the other.
        found = [solver.minimise(held, start, free) for start in starts]
        better = (found[1][1] < found[0][1])[:, None]
        theta = np.where(better, found[1][0], found[0][0])
        data = Problems(part.x[:, :-1], part.y[:, :-1], part.w[:, :-1], part.low, part.high)
        inside = data.sums(theta) <= allowed
        inner, outer = np.where(inside, middle, inner), np.where(inside, outer, middle)
        starts = (np.where(inside[:, None], theta, starts[0]), np.where(inside[:, None], starts[1], theta))
    return inner


def _limits(fit: CurveFit, problem: Problems, log_at: Array, sums: float) -> Array:
    """How far the sum of squares may rise at every place, [K]: correlated residuals widen each place by its own."""
    num, known = fit.num_observations, fit.variance
    limit = allowed_excess(np.array([sums]), num, fit.num_parameters, fit.level, known)
    if fit.correlation is None:
        return np.repeat(limit, len(log_at))
    at_place = Problems(log_at[None], np.zeros((1, len(log_at))), np.ones((1, 1)), problem.low, problem.high)
    gradient = solver.jacobian(at_place, fit.theta()[None])[0].T
    return limit * fit.correlation.widening(gradient, fit.level) ** 2


def _first_pull(fit: CurveFit, problem: Problems, log_at: Array, limit: Array, free: Mask) -> Array:
    """Log of the pull that would do if the curve were linear in its parameters, [K]."""
    theta = np.repeat(fit.theta()[None], len(log_at), axis=0)
    at_place = Problems(log_at[:, None], np.zeros((len(log_at), 1)), np.ones((1, 1)), problem.low, problem.high)
    outer, _ = solver.curvature(at_place, theta)  # gradient times its transpose
    matrix = solver.curvature(problem, theta[:1])[0][0]
    inverse = np.zeros((4, 4))
    inverse[np.ix_(free, free)] = np.linalg.pinv(matrix[np.ix_(free, free)], rcond=1e-10)
    variance = np.maximum((outer * inverse).sum((1, 2)), 1e-12)
    shift = np.minimum(np.sqrt(limit * variance), 0.5)
    return np.clip(np.log(shift / (variance * (1 - shift))), *PULLS)


def _scores(theta: Array, log_at: Array) -> Array:
    span = theta[:, solver.A] - theta[:, solver.R0]
    return theta[:, solver.R0] + span * rise(log_at, theta[:, solver.LOG_B], theta[:, solver.LOG_C_MID])


def add_noise(fit: CurveFit, prediction: Prediction, stderr: Array | None = None) -> Interval | tuple[Array, Array]:
    """Widen the intervals of a prediction to those of newly measured points: [K] low, [K] high.

    stderr: standard errors of the new points; without, their noise is that around the curve.
    """
    tail = 0.5 + fit.level / 2
    if stderr is not None and fit.variance is not None:
        spread: Array | float = float(norm.ppf(tail)) * stderr
    else:
        spread = float(student.ppf(tail, fit.dof)) * fit.noise
        unit = fit.points.unit_variance()
        if stderr is not None and unit is not None:
            # The same relation between noise and standard error as in the fitted points.
            spread = spread * stderr / np.sqrt(unit)
    low = prediction.score - np.hypot(prediction.score - prediction.low, spread)
    high = prediction.score + np.hypot(prediction.high - prediction.score, spread)
    return low, high


def band(fit: CurveFit, low: float, high: float) -> Prediction:
    """Predictions on a logarithmic grid from `low` to `high`, for a plot.

    No curve falls, so neither end of the interval does: where the search at one place was less exact than at its
    neighbour the wider one counts.
    """
    least, per_decade, most = BAND_POINTS
    num = int(np.clip(np.ceil(np.log10(high / low) * per_decade), least, most))
    found = predict(fit, np.geomspace(low, high, num))
    lowest = np.minimum.accumulate(found.low[::-1])[::-1]
    return dataclasses.replace(found, low=lowest, high=np.maximum.accumulate(found.high))


def compute_to_reach(fit: CurveFit, score: float) -> Reach:
    """Compute at which the curve reaches `score`, with an interval read off the band of the predictions.

    Raises:
        ValueError: a score outside (0, 1].
    """
    if not 0 < score <= 1:
        raise ValueError(f"score={score!r} must lie between 0 and 1: it is a pass rate")
    centre = invert(score, fit.A, fit.B, fit.C_mid, fit.R0)
    first, last = fit.points.trained.compute[0], fit.points.compute[-1]
    grid = np.geomspace(first / 10, last * 1000, 90)
    predicted = predict(fit, grid)
    low, high = (_solve_crossing(fit, predicted, end, score) for end in ("high", "low"))
    # The estimate is on its own band; what is left of the grid must not say otherwise.
    return Reach(score, centre, min(low, centre), max(high, centre), fit.level)


def _solve_crossing(fit: CurveFit, predicted: Prediction, end: str, level: float) -> float:
    """First place where an end of the band reaches `level`: that of the grid, then of finer ones around it."""
    found = _crossing(predicted.compute, getattr(predicted, end), level)
    if not 0 < found < float("inf"):
        return found
    for _ in range(REFINEMENTS):
        above = np.flatnonzero(getattr(predicted, end) >= level)
        # An end of the band is good to a part of its width: a finer grid may see the crossing on its edge.
        place = int(np.clip(above[0] if len(above) else len(predicted.compute) - 1, 1, len(predicted.compute) - 1))
        low, high = predicted.compute[place - 1], predicted.compute[place]
        predicted = predict(fit, np.geomspace(low, high, REFINED_POINTS))
    found = _crossing(predicted.compute, getattr(predicted, end), level)
    return float(np.clip(found, predicted.compute[0], predicted.compute[-1]))


def _crossing(grid: Array, values: Array, level: float) -> float:
    """First place where a rising curve reaches `level`, log-linear between grid points; infinity if it never does."""
    above = np.flatnonzero(values >= level)
    if not len(above):
        return float("inf")
    i = int(above[0])
    if i == 0:
        return 0.0
    share = (level - values[i - 1]) / (values[i] - values[i - 1])
    return float(np.exp(np.log(grid[i - 1]) + share * np.log(grid[i] / grid[i - 1])))


def worth_going_on(fit: CurveFit, budget: float, start: float | None = None) -> Gain:
    """Expected gain from `start` (None: the last point) up to a total compute of `budget`.

    Raises:
        FitRefused: the budget is not beyond the start.
    """
    start = float(fit.points.compute[-1]) if start is None else start
    if not budget > start > 0:
        raise FitRefused("budget_spent", f"budget={budget:g} must be more than the compute spent so far, {start:g}")
    predicted = predict(fit, [start, budget])
    now, then = predicted.score
    rising = float(rise(np.log(start), np.log(fit.B), np.log(fit.C_mid)))
    marginal = (fit.A - fit.R0) * rising * (1 - rising) * fit.B / start
    span = fit.A - fit.R0
    return Gain(
        start,
        budget,
        float(then - now),
        float(max(predicted.low[1] - now, 0.0)),
        float(max(predicted.high[1] - now, 0.0)),
        float((then - now) / (budget - start)),
        float(marginal),
        float((then - fit.R0) / span) if span > 0 else float("nan"),
    )
