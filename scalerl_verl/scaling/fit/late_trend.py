# SPDX-License-Identifier: Apache-2.0
"""Does the end of a run leave the curve? A trend from some point on, beside the sigmoid, in either direction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from scalerl_verl.scaling.fit import solver
from scalerl_verl.scaling.fit.correlation import RMSE_FLOOR
from scalerl_verl.scaling.fit.curve import Array
from scalerl_verl.scaling.fit.solver import Problems

SHARES = np.linspace(0.3, 0.85, 12)
"""Of the points, where the trend may begin."""
LEVEL = 0.998
"""Of confidence of one trend; of the 12, which are much alike, about one in 100 is seen where there is none."""
FEW_POINTS = 6  # after the start of the trend; and degrees of freedom


@dataclass(frozen=True)
class LateTrend:
    """first: index of the point where it begins. slope: of the score over the points after it, all of them as one.

    change: of the curve with its trend, from its highest point (slope < 0) or from `first` (slope > 0) to the last.
    """

    first: int
    slope: float
    change: float


def find_late_trend(problems: Problems, theta: Array, num_parameters: int) -> LateTrend | None:
    """The most significant trend beside the fit theta [4] of one problem; None if none is.

    Linear in the trend and, around the fit, in the curve's parameters. Its noise is that of the residuals which the
    trend leaves, correlated as they are: what the trend explains must not count as noise.
    """
    y, root_w = problems.y[0], np.sqrt(problems.w[0])
    num = len(y)
    dof = num - num_parameters - 1
    if dof < FEW_POINTS:
        return None
    fitted = solver.scores(problems, theta[None])[0]
    inside = (theta > problems.low + 1e-9) & (theta < problems.high - 1e-9)
    gradient = (solver.jacobian(problems, theta[None])[0] * inside[:, None]).T
    best: tuple[float, int, Array, Array] | None = None
    for first in np.unique((SHARES * num).astype(int)):
        if num - first < FEW_POINTS:
            break
        trend = np.maximum(np.arange(num) - first, 0.0) / (num - 1 - first)
        design = np.column_stack([gradient, trend])
        change, *_ = np.linalg.lstsq(design * root_w[:, None], (y - fitted) * root_w, rcond=1e-10)
        left = float((((y - fitted - design @ change) * root_w) ** 2).sum())
        if best is None or left < best[0]:
            best = left, int(first), design, change
    if best is None:
        return None
    left, first, design, change = best
    residual = (y - fitted - design @ change) * root_w
    H = np.linalg.pinv((design * root_w[:, None]).T @ (design * root_w[:, None]), rcond=1e-12, hermitian=True)
    error = np.sqrt(max(left, num * RMSE_FLOOR**2) / dof * H[-1, -1] * _inflation(residual))
    if abs(change[-1]) <= float(student.ppf(0.5 + LEVEL / 2, dof)) * error:
        return None
    curve = fitted + design @ change
    top = curve.max() if change[-1] < 0 else curve[first]
    return LateTrend(first, float(change[-1]), float(curve[-1] - top))


def _inflation(residual: Array) -> float:
    """How many times as large correlation makes the variance of a trend: (1 + r) / (1 - r).

    r is the estimate, corrected for its bias, and not averaged over all that it could be: that would explain any trend
    as noise, and a trend that is seen where there is none costs a verdict, one that is missed gives a wrong number.
    """
    total = float(residual @ residual)
    lag_1 = float(residual[1:] @ residual[:-1]) / total if total > 0 else 0.0
    lag_1 = min(max(lag_1 + (1 + 4 * lag_1) / len(residual), 0.0), 0.9)
    return (1 + lag_1) / (1 - lag_1)
