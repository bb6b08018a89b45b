# SPDX-License-Identifier: Apache-2.0
"""The compute-performance sigmoid of ScaleRL (arXiv 2510.13786, Eq. 1) and a fit that says when it knows too little.

A short run cannot tell its ceiling A: before the curve bends, a high ceiling reached slowly and a low one reached soon
look alike. The fit therefore comes with a profile likelihood interval of A and a verdict.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares
from scipy.stats import t as student

MIN_POINTS = 5
MAX_INTERVAL_WIDTH = 0.1
A_STEP = 0.005
B_RANGE = (0.1, 10.0)
C_MID_MARGIN = 100.0  # C_mid is searched from min(compute) / margin to max(compute) * margin
RMSE_FLOOR = 1e-6  # scores are not taken to be more exact than this

Array = NDArray[np.float64]


class FitRefused(ValueError):
    """The data hold no curve to fit; the message says why and what would help."""


@dataclass(frozen=True)
class SigmoidFit:
    """Result of `fit_sigmoid`.

    A, B, C_mid, R0: parameters of Eq. 1; C_mid has the unit of the compute values.
    A_interval_95: 95% profile likelihood interval of A; it never extends beyond the grid, that is from R0 to 1.
    rmse: root mean square residual. num_points: how many points were fitted.
    identified: whether the data pin A down; verdict: one sentence that says so, or why not.
    """

    A: float
    B: float
    C_mid: float
    R0: float
    A_interval_95: tuple[float, float]
    rmse: float
    num_points: int
    identified: bool
    verdict: str


def sigmoid(compute: ArrayLike, A: float, B: float | Array, C_mid: float | Array, R0: float) -> Array:
    """Return `R0 + (A - R0) / (1 + (C_mid / C)^B)` (Eq. 1), which is R0 at C = 0 and half way to A at C_mid.

    `compute` has any unit and shape, C_mid > 0 has the same unit; B > 0 is the steepness and A the ceiling. Arrays
    broadcast.
    """
    compute = np.asarray(compute, dtype=np.float64)
    if not (np.all(np.asarray(B) > 0) and np.all(np.asarray(C_mid) > 0)):
        raise ValueError(f"B={B} and C_mid={C_mid} must both be positive.")
    if np.any(compute < 0):
        raise ValueError(f"compute must be 0 or more; the smallest value given is {compute.min()}.")
    with np.errstate(over="ignore"):
        ratio = (compute / C_mid) ** B
    # Written so that neither C = 0 divides by zero nor an infinite ratio turns into NaN.
    return R0 + (A - R0) * (1 - 1 / (1 + ratio))


def fit_sigmoid(compute: ArrayLike, score: ArrayLike, R0: float | None = None) -> SigmoidFit:
    """Fit Eq. 1 by least squares, with the profile of the residuals over a grid of A.

    Args:
        compute: N distinct positive values. The score at zero compute is not a point of the curve: give it as R0.
        score: N values from 0 to 1.
        R0: score at zero compute; None fits it too, which widens the interval of A.

    Raises:
        FitRefused: the data hold no curve; `_check` has the list.
    """
    compute, score = _check(compute, score, R0)
    lowest = A_STEP if R0 is None else R0
    grid = np.arange(1.0, lowest + A_STEP / 2, -A_STEP, dtype=np.float64)[::-1]
    # Columns of x are (log B, log C_mid, A, R0); a pinned column has equal bounds.
    low = np.array([math.log(B_RANGE[0]), math.log(compute[0] / C_MID_MARGIN), 0.0, 0.0 if R0 is None else R0])
    high = np.array([math.log(B_RANGE[1]), math.log(compute[-1] * C_MID_MARGIN), 1.0, 1.0 if R0 is None else R0])
    starts = _search(compute, score, grid, low, high)
    pinned = np.array([True, True, False, R0 is None])
    fits = [_minimise(compute, score, start, low, high, pinned) for start in starts]
    profile = np.array([sums for _, sums in fits])
    best = int(profile.argmin())
    free = np.array([True, True, True, R0 is None])
    x, sums = _minimise(compute, score, fits[best][0], low, high, free)
    B, C_mid, A, fitted_R0 = math.exp(x[0]), math.exp(x[1]), float(x[2]), float(x[3])
    sum_squares = min(sums, float(profile[best]))
    dof = len(score) - int(free.sum())
    # An exact t interval (squared, it is the F limit): a chi-square limit is far too narrow for a handful of points.
    excess = max(sum_squares, len(score) * RMSE_FLOOR**2) * float(student.ppf(0.975, dof)) ** 2 / dof
    interval = _find_interval(grid, profile - sum_squares, A, excess)
    reason = _find_doubt(A, C_mid, interval, grid, compute)
    text = f"A = {A:.3f}, 95% interval {interval[0]:.3f} to {interval[1]:.3f}"
    verdict = f"A is not identified: {reason}" if reason else f"{text}; C_mid = {C_mid:.4g} lies inside the data."
    rmse = math.sqrt(sum_squares / len(score))
    return SigmoidFit(A, B, C_mid, fitted_R0, interval, rmse, len(score), not reason, verdict)


def _search(compute: Array, score: Array, grid: Array, low: Array, high: Array) -> Array:
    """Return starts x_K4, one for each A of the grid: the best cell of a coarse grid of B and C_mid."""
    log_B, log_C_mid = (axis.ravel() for axis in np.meshgrid(*(np.linspace(low[i], high[i], 60) for i in (0, 1))))
    rise_MN = sigmoid(compute, 1.0, np.exp(log_B)[:, None], np.exp(log_C_mid)[:, None], 0.0)
    fall_MN = 1 - rise_MN
    weight_M = np.maximum((fall_MN**2).sum(1), 1e-12)
    starts = []
    for A in grid:
        rest_MN = score - A * rise_MN
        R0_M = np.clip((rest_MN * fall_MN).sum(1) / weight_M, low[3], min(A, high[3]))  # linear least squares
        cell = int(((rest_MN - R0_M[:, None] * fall_MN) ** 2).sum(1).argmin())
        starts.append([log_B[cell], log_C_mid[cell], A, R0_M[cell]])
    return np.array(starts)


def _minimise(compute: Array, score: Array, x_4: Array, low: Array, high: Array, free: Array) -> tuple[Array, float]:
    """Least squares over the free columns of (log B, log C_mid, A, R0) within bounds; return (x_4, sum of squares)."""

    def fill(values: Array) -> Array:
        full_4 = x_4.copy()
        full_4[free] = values
        return full_4

    def residuals(values: Array) -> Array:
        log_B, log_C_mid, A, R0 = fill(values)
        return sigmoid(compute, A, math.exp(log_B), math.exp(log_C_mid), R0) - score

    # A start on a bound is refused; a relative nudge inwards is far below the grid's step.
    margin = 1e-9 * (high - low)[free]
    start = np.clip(x_4[free], low[free] + margin, high[free] - margin)
    found = least_squares(residuals, start, bounds=(low[free], high[free]), x_scale="jac", xtol=1e-12, ftol=1e-12)
    return fill(found.x), float(2 * found.cost)


def _find_interval(grid: Array, rise: Array, best_A: float, limit: float) -> tuple[float, float]:
    """Return where the profile, 0 at the best A, crosses the limit on either side, or the grid's ends."""
    ends = []
    for side in (np.flatnonzero(grid < best_A)[::-1], np.flatnonzero(grid > best_A)):
        inner_A, inner_root, end = best_A, 0.0, best_A
        for place in side:  # outwards; the root of a profile is close to linear in A
            root = math.sqrt(max(float(rise[place]), 0.0))
            if root > math.sqrt(limit):
                end = inner_A + (grid[place] - inner_A) * (math.sqrt(limit) - inner_root) / (root - inner_root)
                break
            inner_A, inner_root, end = float(grid[place]), root, float(grid[place])
        ends.append(float(end))
    return ends[0], ends[1]


def _check(compute: ArrayLike, score: ArrayLike, R0: float | None) -> tuple[Array, Array]:
    """Return sorted float64 arrays, or refuse."""
    compute, score = (np.asarray(values, dtype=np.float64) for values in (compute, score))
    if compute.ndim != 1 or compute.shape != score.shape:
        raise FitRefused(f"compute {compute.shape} and score {score.shape} must be two lists of the same length.")
    if not (np.isfinite(compute).all() and np.isfinite(score).all()):
        raise FitRefused("compute or score holds a NaN or an infinity; leave those points out.")
    if np.any(compute <= 0):
        raise FitRefused(f"compute must be positive, got {compute.min():g}; give the score at zero compute as R0.")
    if len(compute) < MIN_POINTS:
        raise FitRefused(f"{len(compute)} points with compute > 0; a fit needs {MIN_POINTS}: evaluate more often.")
    if score.min() < 0 or score.max() > 1:
        raise FitRefused(f"scores run from {score.min():g} to {score.max():g}; pass rates lie between 0 and 1.")
    if len(np.unique(compute)) < len(compute):
        raise FitRefused("compute values are duplicated; keep one point for each value, or average their scores.")
    if np.ptp(score) == 0:
        raise FitRefused(f"every score is {score[0]:g}; a constant has no ceiling to extrapolate to.")
    if R0 is not None and not 0 <= R0 <= 1 - 2 * A_STEP:
        raise FitRefused(f"R0={R0} must lie between 0 and {1 - 2 * A_STEP}: Eq. 1 rises from it to at most 1.")
    order = np.argsort(compute)
    return compute[order], score[order]


def _find_doubt(A: float, C_mid: float, interval: tuple[float, float], grid: Array, compute: Array) -> str:
    """Return why A is not identified, or an empty string."""
    if interval[1] - interval[0] > MAX_INTERVAL_WIDTH:
        return (
            f"ceilings from {interval[0]:.2f} to {interval[1]:.2f} fit about equally well; train longer or evaluate on "
            "more problems."
        )
    if grid[0] + A_STEP / 2 >= A or grid[-1] - A_STEP / 2 <= A:
        return f"the best ceiling, {A:.3f}, lies on the edge of what was searched ({grid[0]:.3f} to {grid[-1]:.3f})."
    if not compute[0] <= C_mid <= compute[-1]:
        return f"C_mid = {C_mid:.4g} lies outside the data ({compute[0]:.4g} to {compute[-1]:.4g})."
    return ""
