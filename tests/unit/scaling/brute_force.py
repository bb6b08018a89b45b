# SPDX-License-Identifier: Apache-2.0
"""Profile intervals by brute force: every curve of a fine grid, A and R0 solved for within their bounds."""

from __future__ import annotations

import numpy as np

from scalerl_verl.scaling import CurveFit
from scalerl_verl.scaling.fit.profile import allowed_excess
from scalerl_verl.scaling.fit.solver import LOG_B, LOG_C_MID, make_bounds


def widest(fit: CurveFit, num_B: int = 240, num_C: int = 320, num_A: int = 1001) -> dict[str, tuple[float, float]]:
    """Ends of the intervals of A, B and C_mid of a fit with a free R0: all that stays within the fit's limit."""
    points, w = fit.points, fit.points.weights()
    y, x = points.score, points.log_compute
    excess = float(
        allowed_excess(np.array([fit.sse]), fit.num_observations, fit.num_parameters, fit.level, fit.variance)[0]
    )
    limits = fit.sse + excess * fit.correlation.widening(np.eye(4), fit.level) ** 2
    low, high = make_bounds(points.trained.compute, None)
    log_B, log_C = np.linspace(low[1], high[1], num_B), np.linspace(low[2], high[2], num_C)
    A = np.linspace(0, 1, num_A)[:, None]
    profile_A, profile_B, profile_C = (np.full(num, np.inf) for num in (num_A, num_B, num_C))
    for i, b in enumerate(log_B):
        g = 1 / (1 + np.exp(np.clip(-np.exp(b) * (x - log_C[:, None]), -700, 700)))
        h = 1 - g
        gg, gh, hh, yg, yh = ((w * part).sum(1) for part in (g * g, g * h, h * h, y * g, y * h))
        R0 = np.clip((yh - A * gh) / np.maximum(hh, 1e-300), 0, A)
        sums = (w * y * y).sum() - 2 * (A * yg + R0 * yh) + A * A * gg + 2 * A * R0 * gh + R0 * R0 * hh
        profile_A = np.minimum(profile_A, sums.min(1))
        profile_B[i] = sums.min()
        profile_C = np.minimum(profile_C, sums.min(0))
    found = {}
    for name, values, profile, limit in (
        ("A", A[:, 0], profile_A, limits[0]),
        ("B", np.exp(log_B), profile_B, limits[LOG_B]),
        ("C_mid", np.exp(log_C), profile_C, limits[LOG_C_MID]),
    ):
        inside = values[profile <= limit]
        found[name] = (float(inside.min()), float(inside.max()))
    return found
