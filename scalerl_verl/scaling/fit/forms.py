# SPDX-License-Identifier: Apache-2.0
"""Other curves than Eq. 1, and two forecasts that assume no curve at all: what a sigmoid has to be better than."""

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
from scalerl_verl.scaling.fit.result import CurveFit

SIGMOID = "sigmoid"
FORMS = {
    SIGMOID: "sigmoid (Eq. 1)",
    "power_law": "power law",
    "exponential": "exponential",
    "logistic": "logistic in compute",
    "log_line": "line in log compute",
    "last_fifth": "the last fifth stays",
}
"""Every form, and its name for a reader."""
NAIVE = ("log_line", "last_fifth")
"""These know no ceiling that is still to come."""
NUM_PARAMETERS = {"power_law": 3, "exponential": 3, "logistic": 4, "log_line": 2, "last_fifth": 1}
LAST_SHARE = 0.2


@dataclass(frozen=True)
class RivalFit:
    """A fitted form: its ceiling A (NaN: it has none), other parameters by name, and sum of squares."""

    form: str
    A: float
    parameters: dict[str, float]
    sse: float

    def curve(self, compute: ArrayLike) -> Array:
        """Fitted scores at positive compute values; a line is cut at the scores 0 and 1."""
        compute, p = np.asarray(compute, dtype=np.float64), self.parameters
        if self.form == SIGMOID:
            return sigmoid(compute, self.A, p["B"], p["C_mid"], p["R0"])
        if self.form == "power_law":
            return self.A - p["D"] * compute ** -p["B"]
        if self.form == "exponential":
            return self.A - (self.A - p["R0"]) * np.exp(-compute / p["tau"])
        if self.form == "log_line":
            return np.clip(p["at_1"] + p["slope"] * np.log(compute), 0.0, 1.0)
        if self.form == "last_fifth":
            return np.full(compute.shape, self.A)
        return p["R0"] + (self.A - p["R0"]) * expit(p["k"] * (compute - p["C_mid"]))


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
        rise_by, sse = _solve_rise(points, g, R0)
        return R0 + rise_by, R0, sse

    starts = [np.array([k, c]) for k in np.log([1.0, 4.0, 16.0, 64.0]) for c in (-0.2, 0.0, 0.2, 0.5, 1.0, 2.0)]
    begin = min(starts, key=residuals_sum)
    found = minimize(
        residuals_sum, begin, method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-12, "maxiter": 600}
    )
    A, bottom, sse = solve(found.x)
    return RivalFit(
        "logistic", A, {"k": float(np.exp(found.x[0]) / span), "C_mid": float(found.x[1] * span), "R0": bottom}, sse
    )


def fit_exponential(points: Points, R0: float | None) -> RivalFit:
    """Weighted least squares of `R = A - (A - R0) exp(-C / tau)`; a point at zero compute observes R0."""

    def solve(log_tau: float) -> tuple[float, float, float]:
        left = np.exp(-points.compute / np.exp(log_tau))
        if R0 is None:
            return _solve_two(points, 1 - left, left, 1.0)
        rise_by, sse = _solve_rise(points, 1 - left, R0)
        return R0 + rise_by, R0, sse

    trained = points.trained.compute
    A, bottom, sse, log_tau = _search_one(solve, float(np.log(trained[0] / 10)), float(np.log(trained[-1] * 100)))
    return RivalFit("exponential", A, {"R0": bottom, "tau": float(np.exp(log_tau))}, sse)


def fit_log_line(points: Points) -> RivalFit:
    """Weighted least squares of `R = at_1 + slope log C`: no ceiling, and no sign of one."""
    points = points.trained
    w = points.weights()
    x = points.log_compute - np.average(points.log_compute, weights=w)
    mean = float(np.average(points.score, weights=w))
    slope = float((w * x * (points.score - mean)).sum() / max((w * x * x).sum(), 1e-300))
    at_1 = mean - slope * float(np.average(points.log_compute, weights=w))
    sse = float((w * (points.score - mean - slope * x) ** 2).sum())
    return RivalFit("log_line", float("nan"), {"at_1": at_1, "slope": slope}, sse)


def fit_last_fifth(points: Points) -> RivalFit:
    """The weighted mean of the last fifth of the points, at least one: the run stays where it is."""
    points = points.trained
    num = max(round(LAST_SHARE * len(points)), 1)
    w = points.weights()[-num:]
    mean = float(np.average(points.score[-num:], weights=w))
    return RivalFit("last_fifth", mean, {}, float((w * (points.score[-num:] - mean) ** 2).sum()))


def of_fit(fit: CurveFit) -> RivalFit:
    """The sigmoid as one form among the others."""
    return RivalFit(SIGMOID, fit.A, {"B": fit.B, "C_mid": fit.C_mid, "R0": fit.R0}, fit.sse)


def fit_form(form: str, points: Points, R0: float | None) -> RivalFit:
    """Fit one of `FORMS`.

    Raises:
        FitRefused: the data hold no curve.
        ValueError: another form.
    """
    if form == SIGMOID:
        return of_fit(fit_points(points, R0=R0))
    if form not in FORMS:
        raise ValueError(f"form={form!r}: use one of {', '.join(FORMS)}")
    num, needed = len(points.trained), NUM_PARAMETERS[form] + 2
    if num < needed:
        raise FitRefused(
            "too_few_points", f"{num} points with compute > 0; {FORMS[form]} needs {needed}: evaluate more often."
        )
    if form == "exponential":
        return fit_exponential(points, R0)
    if form == "logistic":
        return fit_logistic(points, R0)
    return {"power_law": fit_power_law, "log_line": fit_log_line, "last_fifth": fit_last_fifth}[form](points)


def _solve_rise(points: Points, g: Array, R0: float) -> tuple[float, float]:
    """Least squares of score = R0 + a g with 0 <= a <= 1 - R0: (a, sum of squares)."""
    w, y = points.weights(), points.score - R0
    rise_by = float(np.clip((w * y * g).sum() / max((w * g * g).sum(), 1e-300), 0.0, 1 - R0))
    return rise_by, float((w * (y - rise_by * g) ** 2).sum())


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
