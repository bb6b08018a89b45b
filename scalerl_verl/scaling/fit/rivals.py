# SPDX-License-Identifier: Apache-2.0
"""Other curves, for honesty: does the sigmoid predict held-out later points better than a power law?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize
from scipy.special import expit

from scalerl_verl.scaling.fit.curve import Array, sigmoid
from scalerl_verl.scaling.fit.fitting import fit_points
from scalerl_verl.scaling.fit.points import FitRefused, Points

FORMS = ("sigmoid", "power_law", "logistic")


@dataclass(frozen=True)
class RivalFit:
    """A fitted curve of some form: its ceiling A, other parameters by name, and sum of squares."""

    form: str
    A: float
    parameters: dict[str, float]
    sse: float

    def curve(self, compute: ArrayLike) -> Array:
        """Fitted scores."""
        compute, p = np.asarray(compute, dtype=np.float64), self.parameters
        if self.form == "sigmoid":
            return sigmoid(compute, self.A, p["B"], p["C_mid"], p["R0"])
        if self.form == "power_law":
            return self.A - p["D"] * compute ** -p["B"]
        return p["R0"] + (self.A - p["R0"]) * expit(p["k"] * (compute - p["C_mid"]))


@dataclass(frozen=True)
class HeldOut:
    """Error of one form on later points: fitted to the first `num_fitted`, tested on the `num_held_out` after them.

    rmse, mean_error: of the predictions (mean_error > 0: predicted too high). fit: None if refused, and why.
    """

    form: str
    num_fitted: int
    num_held_out: int
    rmse: float
    mean_error: float
    fit: RivalFit | None
    refused: str = ""


def fit_power_law(points: Points) -> RivalFit:
    """Weighted least squares of `R = A - D / C^B` with 0 <= A <= 1, D >= 0, B > 0: the tail of Eq. 1, so of C > 0."""
    points = points.trained
    scale = float(np.exp(np.log(points.compute).mean()))

    def basis(log_B: float) -> Array:
        return -((points.compute / scale) ** -np.exp(log_B))

    def solve(log_B: float) -> tuple[float, float, float]:
        return _solve_two(points, np.ones(len(points)), basis(log_B), 1.0)

    A, D, sse, log_B = _search_one(solve, np.log(1e-3), np.log(20.0))
    B = float(np.exp(log_B))
    return RivalFit("power_law", A, {"D": D * scale**B, "B": B}, sse)


def fit_logistic(points: Points, R0: float | None) -> RivalFit:
    """Weighted least squares of `R = R0 + (A - R0) / (1 + exp(-k (C - C_mid)))`: logistic in compute itself.

    R0 is not its score at zero compute; where that was measured and R0 is not given it is taken for it.
    """
    R0 = points.start if R0 is None else R0
    points = points.trained
    span = points.compute[-1] - points.compute[0]

    def residuals_sum(x: Array) -> float:
        return solve(x)[2]

    def solve(x: Array) -> tuple[float, float, float]:
        g = expit(np.exp(x[0]) / span * (points.compute - x[1] * span))
        if R0 is None:
            return _solve_two(points, g, 1 - g, 1.0)
        w, y = points.weights(), points.score - R0
        rise_by = float(np.clip((w * y * g).sum() / max((w * g * g).sum(), 1e-300), 0.0, 1 - R0))
        return R0 + rise_by, R0, float((w * (y - rise_by * g) ** 2).sum())

    starts = [np.array([k, c]) for k in np.log([1.0, 4.0, 16.0, 64.0]) for c in (-0.2, 0.0, 0.2, 0.5, 1.0, 2.0)]
    begin = min(starts, key=residuals_sum)
    found = minimize(
        residuals_sum, begin, method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-12, "maxiter": 600}
    )
    A, bottom, sse = solve(found.x)
    return RivalFit(
        "logistic", A, {"k": float(np.exp(found.x[0]) / span), "C_mid": float(found.x[1] * span), "R0": bottom}, sse
    )


def fit_form(form: str, points: Points, R0: float | None) -> RivalFit:
    """Fit one of `FORMS`.

    Raises:
        FitRefused: the data hold no curve.
        ValueError: another form.
    """
    if form == "sigmoid":
        fit = fit_points(points, R0=R0)
        return RivalFit(form, fit.A, {"B": fit.B, "C_mid": fit.C_mid, "R0": fit.R0}, fit.sse)
    if form == "power_law":
        return fit_power_law(points)
    if form == "logistic":
        return fit_logistic(points, R0)
    raise ValueError(f"form={form!r}: use one of {', '.join(FORMS)}")


def compare_held_out(points: Points, R0: float | None, share: float = 0.5) -> tuple[HeldOut, ...]:
    """Fit every form to the points in the first `share` of the compute and test it on the later ones.

    Raises:
        FitRefused: no point is left on one side.
        ValueError: a share outside (0, 1).
    """
    if not 0 < share < 1:
        raise ValueError(f"share={share!r} must lie between 0 and 1")
    early = points.compute <= share * points.compute[-1]
    if early.all() or not early.any():
        raise FitRefused("too_few_points", f"no points on one side of {share:.0%} of the compute.")
    fitted, later = points.select(early), points.select(~early)
    found = []
    for form in FORMS:
        try:
            fit = fit_form(form, fitted, R0)
        except FitRefused as refusal:
            found.append(HeldOut(form, len(fitted.trained), len(later), np.nan, np.nan, None, str(refusal)))
            continue
        error = fit.curve(later.compute) - later.score
        rmse = float(np.sqrt((error**2).mean()))
        found.append(HeldOut(form, len(fitted.trained), len(later), rmse, float(error.mean()), fit))
    return tuple(found)


def _solve_two(points: Points, u: Array, v: Array, highest: float) -> tuple[float, float, float]:
    """Least squares of score = a u + b v with 0 <= a <= highest, b >= 0: (a, b, sum of squares)."""
    w, y = points.weights(), points.score
    uu, uv, vv, yu, yv = ((w * p * q).sum() for p, q in ((u, u), (u, v), (v, v), (y, u), (y, v)))
    candidates = []
    determinant = uu * vv - uv * uv
    if determinant > 1e-14 * uu * vv:
        candidates.append(((yu * vv - yv * uv) / determinant, (yv * uu - yu * uv) / determinant))
    for a in (0.0, highest):
        candidates.append((a, max((yv - a * uv) / max(vv, 1e-300), 0.0)))
    candidates.append((min(max(yu / max(uu, 1e-300), 0.0), highest), 0.0))
    inside = [(a, b) for a, b in candidates if 0 <= a <= highest and b >= 0]
    return min(
        ((float(a), float(b), float((w * (y - a * u - b * v) ** 2).sum())) for a, b in inside), key=lambda t: t[2]
    )


def _search_one(
    solve: Callable[[float], tuple[float, float, float]], low: float, high: float
) -> tuple[float, float, float, float]:
    """Least sum of squares over one more parameter: a grid, then golden-section steps around its best value."""
    grid = np.linspace(low, high, 120)
    sums = [solve(value)[2] for value in grid]
    best = int(np.argmin(sums))
    left, right = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    ratio = (np.sqrt(5) - 1) / 2
    for _ in range(60):
        a, b = right - ratio * (right - left), left + ratio * (right - left)
        if solve(a)[2] <= solve(b)[2]:
            right = b
        else:
            left = a
    value = (left + right) / 2
    return (*solve(value), value)
