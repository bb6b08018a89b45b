# SPDX-License-Identifier: Apache-2.0
"""Fits and profile intervals against iminuit, which physicists use for the same: MIGRAD and MINOS."""

from __future__ import annotations

import numpy as np
import pytest
from iminuit import Minuit

from scalerl_verl.scaling import fit_curve, sigmoid
from scalerl_verl.scaling.fit.profile import allowed_excess


@pytest.mark.parametrize("is_observed", [False, True])
@pytest.mark.parametrize("last", [50000.0, 20000.0])
@pytest.mark.parametrize("seed", range(2))
def test_fit_and_intervals_are_those_of_migrad_and_minos(last, is_observed, seed):
    """Of log B and log C_mid MINOS finds the same ends: a profile does not depend on the parametrisation."""
    rng = np.random.default_rng(seed)
    compute = np.concatenate([[0.0], np.linspace(1500, last, 40)])
    spread = np.linspace(0.5, 1.5, 41) * 0.006
    score = sigmoid(compute, 0.645, 1.7, 8000, 0.3) + spread * rng.normal(0, 1, 41)
    if is_observed:
        fit = fit_curve(compute, score, spread)
    else:
        fit = fit_curve(compute[1:], score[1:], spread[1:], R0=0.3)
    points, w = fit.points, fit.points.weights()

    def cost(A: float, log_B: float, log_C: float, R0: float) -> float:
        return float((w * (points.score - sigmoid(points.compute, A, np.exp(log_B), np.exp(log_C), R0)) ** 2).sum())

    excess = float(
        allowed_excess(np.array([fit.sse]), fit.num_observations, fit.num_parameters, fit.level, fit.variance)[0]
    )
    ours = {
        "A": fit.A_interval,
        "log_B": tuple(np.log(fit.B_interval)),
        "log_C": tuple(np.log(fit.C_mid_interval)),
        "R0": fit.R0_interval,
    }
    widening = fit.correlation.widening(np.eye(4), fit.level)
    for place, (name, ends) in enumerate(ours.items()):
        if ends is None:
            continue
        minuit = Minuit(cost, A=0.6, log_B=0.3, log_C=9.2, R0=0.3)
        minuit.fixed["R0"] = not is_observed
        minuit.errordef = excess * widening[place] ** 2
        minuit.migrad()
        assert minuit.valid and minuit.fval == pytest.approx(fit.sse, rel=1e-4)
        minuit.minos(name)
        error = minuit.merrors[name]
        assert error.is_valid
        best = minuit.values[name]
        half = (error.upper - error.lower) / 2
        assert ends == pytest.approx((best + error.lower, best + error.upper), abs=0.01 * half), name
