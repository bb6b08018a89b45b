# SPDX-License-Identifier: Apache-2.0
"""Does the end of a run leave the curve, or could it, unseen? A trend from some point on, beside the sigmoid."""

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
BOUND_LEVEL = 0.95
"""Of confidence of the upper end of a rise that is not seen."""
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
    num = problems.y.shape[1]
    dof = num - num_parameters - 1
    if dof < FEW_POINTS:
        return None
    found: list[tuple[int, _Beside]] = []
    for first in np.unique((SHARES * num).astype(int)):
        if num - first < FEW_POINTS:
            break
        trend = np.maximum(np.arange(num) - first, 0.0) / (num - 1 - first)
        found.append((int(first), _fit_beside(problems, theta, trend, dof)))
    if not found:
        return None
    first, best = min(found, key=lambda item: item[1].left)
    if abs(best.slope) <= float(student.ppf(0.5 + LEVEL / 2, dof)) * best.error:
        return None
    top = best.curve.max() if best.slope < 0 else best.curve[first]
    return LateTrend(first, best.slope, float(best.curve[-1] - top))


def bound_late_rise(problems: Problems, theta: Array, num_parameters: int) -> float | None:
    """How much the score may rise beyond the curve with every doubling of compute after C_mid, by the data.

    The upper end, at `BOUND_LEVEL`, of a line in log compute from C_mid on, beside the curve. An estimate below 0
    counts as 0: it does not make the data see more than they can. None where no point lies beyond C_mid, or too few
    are left.
    """
    doublings = np.maximum(problems.x[0] - theta[solver.LOG_C_MID], 0.0) / np.log(2.0)
    dof = problems.y.shape[1] - num_parameters - 1
    if dof < 1 or not doublings.any():
        return None
    beside = _fit_beside(problems, theta, doublings, dof)
    return max(beside.slope, 0.0) + float(student.ppf(BOUND_LEVEL, dof)) * beside.error


@dataclass(frozen=True)
class _Beside:
    """A trend beside the curve: its slope with standard error, curve and trend [N], sum of squares left."""

    slope: float
    error: float
    curve: Array
    left: float


def _fit_beside(problems: Problems, theta: Array, trend: Array, dof: int) -> _Beside:
    y, root_w = problems.y[0], np.sqrt(problems.w[0])
    fitted = solver.scores(problems, theta[None])[0]
    inside = (theta > problems.low + 1e-9) & (theta < problems.high - 1e-9)
    gradient = (solver.jacobian(problems, theta[None])[0] * inside[:, None]).T
    design = np.column_stack([gradient, trend])
    change, *_ = np.linalg.lstsq(design * root_w[:, None], (y - fitted) * root_w, rcond=1e-10)
    residual = (y - fitted - design @ change) * root_w
    left = float((residual**2).sum())
    H = np.linalg.pinv((design * root_w[:, None]).T @ (design * root_w[:, None]), rcond=1e-12, hermitian=True)
    error = np.sqrt(max(left, len(y) * RMSE_FLOOR**2) / dof * H[-1, -1] * _inflation(residual))
    return _Beside(float(change[-1]), float(error), fitted + design @ change, left)


def _inflation(residual: Array) -> float:
    """How many times as large correlation makes the variance of a trend: (1 + r) / (1 - r).

    r is the estimate, corrected for its bias, and not averaged over all that it could be: that would explain any trend
    as noise, and a trend that is seen where there is none costs a verdict, one that is missed gives a wrong number.
    """
    total = float(residual @ residual)
    lag_1 = float(residual[1:] @ residual[:-1]) / total if total > 0 else 0.0
    lag_1 = min(max(lag_1 + (1 + 4 * lag_1) / len(residual), 0.0), 0.9)
    return (1 + lag_1) / (1 - lag_1)
