# SPDX-License-Identifier: Apache-2.0
"""Intervals: the profile itself, also at bounds; correlated residuals; what the end of a run says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from scalerl_verl.scaling import Points, fit_curve, sigmoid
from scalerl_verl.scaling.fit import solver
from scalerl_verl.scaling.fit.correlation import estimate
from scalerl_verl.scaling.fit.fitting import pose
from scalerl_verl.scaling.fit.late_trend import find_late_trend
from tests.unit.scaling.brute_force import widest

CURVES = Path(__file__).parent / "curves"
TRUTH = (0.645, 1.7, 8000.0, 0.3)


def read(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute, score and standard error of a run that was read off a public log."""
    table = np.genfromtxt(CURVES / f"{name}.csv", delimiter=",", skip_header=1)
    return table[:, 0], table[:, 1], table[:, 2]


def wander(num: int, rho: float, rng: np.random.Generator) -> np.ndarray:
    noise = rng.normal(0, 1, num)
    for i in range(1, num):
        noise[i] = rho * noise[i - 1] + np.sqrt(1 - rho**2) * noise[i]
    return noise


def window(num: int = 40, last: float = 50000.0) -> tuple[np.ndarray, np.ndarray]:
    """Compute from 0 and the noise-free score."""
    compute = np.concatenate([[0.0], np.linspace(1500, last, num)])
    return compute, sigmoid(compute, *TRUTH)


@pytest.mark.parametrize("name", ["interval_A_edge", "interval_R0_edge", "verl_q0.5b_resp512_val"])
def test_intervals_are_those_of_brute_force_also_where_the_best_value_is_a_bound(name):
    """To 1% of an interval's width (of the logarithm's for B and C_mid, and a step of the grid there)."""
    fit = fit_curve(*read(name))
    brute = widest(fit)
    width = brute["A"][1] - brute["A"][0]
    # The grid can only miss what lies inside: our ends may lie a step outside of its.
    assert brute["A"][0] - 0.01 * width - 0.002 <= fit.A_interval[0] <= brute["A"][0] + 0.01 * width
    assert brute["A"][1] - 0.01 * width <= fit.A_interval[1] <= brute["A"][1] + 0.01 * width + 0.012
    low, high = make_log_bounds(fit)
    for name, ends, steps in (("B", fit.B_interval, (high[1] - low[1]) / 239), ("C_mid", fit.C_mid_interval, 0.04)):
        slack = 0.01 * np.log(brute[name][1] / brute[name][0]) + 2 * steps
        assert np.log(ends) == pytest.approx(np.log(brute[name]), abs=slack), name


def make_log_bounds(fit):
    return solver.make_bounds(fit.points.trained.compute, None)


def test_interval_does_not_collapse_on_the_bound():
    low, high = fit_curve(*read("interval_A_edge")).A_interval
    assert low < 0.53 and high == 1.0
    low, high = fit_curve(*read("interval_R0_edge")).A_interval
    assert low == pytest.approx(0.70, abs=0.005) and high == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize(("rho", "least", "most"), [(0.0, 1.0, 1.5), (0.6, 1.5, 4.0)])
def test_correlation_of_residuals_is_reported_and_widens(rho, least, most):
    rng = np.random.default_rng(0)
    compute, truth = window(100)
    fits = [fit_curve(compute, truth + 0.008 * wander(101, rho, rng)) for _ in range(5)]
    assert np.mean([fit.residual_correlation for fit in fits]) == pytest.approx(rho, abs=0.12)
    assert least <= np.mean([fit.widening for fit in fits]) <= most
    assert fits[0].to_dict()["residual_correlation"] == fits[0].residual_correlation


def test_widening_is_that_of_the_profile_interval():
    compute, truth = window(100)
    fit = fit_curve(compute, truth + 0.008 * wander(101, 0.6, np.random.default_rng(1)))
    alone = fit_curve(compute, truth + 0.008 * wander(101, 0.0, np.random.default_rng(1)))
    assert fit.widening > 1.4 > alone.widening >= 1.0
    half = (fit.A_interval[1] - fit.A_interval[0]) / 2
    gradient = solver.jacobian(pose(fit.points, None), fit.theta()[None])[0]
    error = fit.noise * np.sqrt(np.linalg.inv(gradient @ gradient.T)[0, 0])
    assert half == pytest.approx(1.985 * error * fit.widening, rel=0.06)


def test_correlation_never_narrows():
    compute, truth = window(60)
    zigzag = fit_curve(compute, truth + 0.005 * (-1.0) ** np.arange(61))
    assert zigzag.residual_correlation < -0.9 and zigzag.widening == pytest.approx(1.0, abs=0.02)


def test_noise_that_is_known_is_widened_by_correlation_alone():
    compute, truth = window(60)
    score = truth + 0.005 * wander(61, 0.6, np.random.default_rng(2))
    known = fit_curve(compute, score, np.full(61, 0.005), errors="absolute")
    smaller = fit_curve(compute, score, np.full(61, 0.0025), errors="absolute")
    assert known.widening == pytest.approx(smaller.widening, rel=1e-6) and known.widening > 1.3


def test_scores_without_noise_have_no_correlation():
    compute, truth = window(30)
    problems = pose(Points.make(compute, truth), None)
    found = estimate(problems, np.array([TRUTH[0], np.log(TRUTH[1]), np.log(TRUTH[2]), TRUTH[3]]), 4, False)
    assert found.weight[0] == 1.0 and found.widening(np.eye(4), 0.95) == pytest.approx(1.0)


def test_run_that_falls_is_not_identified_whatever_is_cut_off_before():
    compute, score, stderr = read("identified_falling")
    fit = fit_curve(compute, score, stderr)
    assert fit.verdict == "not_monotone" and "falls by 0.1" in fit.explain()
    compute, truth = window(60)
    score = truth - 0.1 * np.clip((compute - 25000) / 5000, 0, 1) + 0.003 * wander(61, 0.0, np.random.default_rng(0))
    for warm_up in (0.0, 31000.0):
        assert "not_monotone" in {t.code for t in fit_curve(compute, score, warm_up=warm_up).troubles}, warm_up


def test_dip_that_was_made_up_for_before_the_cut_is_forgiven():
    compute, truth = window(60)
    score = truth + 0.003 * wander(61, 0.0, np.random.default_rng(0))
    score[(compute > 8000) & (compute < 14000)] -= 0.2
    codes = {
        warm_up: {t.code for t in fit_curve(compute, score, warm_up=warm_up).troubles} for warm_up in (0.0, 15000.0)
    }
    assert "not_monotone" in codes[0.0] and "not_monotone" not in codes[15000.0]


def test_late_rise_is_a_verdict_of_its_own():
    compute, truth = window(60)
    rng = np.random.default_rng(0)
    score = truth + 0.06 * np.clip((compute - 25000) / 25000, 0, 1) + 0.005 * wander(61, 0.0, rng)
    fit = fit_curve(compute, score)
    assert fit.verdict == "late_rise" and not fit.identified
    # A run whose early windows promised .50 and .53 ended at .56.
    for share in (0.5, 1.0):
        x, y, stderr = read("verl_q0.5b_resp512_val")
        early = x <= share * x[-1]
        assert "late_rise" in {t.code for t in fit_curve(x[early], y[early], stderr[early]).troubles}


@pytest.mark.parametrize(("rho", "most"), [(0.0, 2), (0.6, 8)])
def test_trend_is_rarely_seen_where_there_is_none(rho, most):
    rng = np.random.default_rng(4)
    compute, truth = window(60)
    seen = 0
    for _ in range(50):
        problems = pose(Points.make(compute, truth + 0.008 * wander(61, rho, rng)), None)
        start = np.array([[TRUTH[0], np.log(TRUTH[1]), np.log(TRUTH[2]), TRUTH[3]]])
        theta, _ = solver.minimise(problems, start, np.ones(4, dtype=bool))
        seen += find_late_trend(problems, theta[0], 4) is not None
    assert seen <= most


def test_fit_without_its_correlation_predicts_more_narrowly():
    from scalerl_verl.scaling.fit.prediction import predict

    compute, truth = window(60)
    fit = fit_curve(compute, truth + 0.008 * wander(61, 0.6, np.random.default_rng(5)))
    alone = predict(dataclasses.replace(fit, correlation=None), [100000.0])
    widened = predict(fit, [100000.0])
    ratio = (widened.high - widened.low) / (alone.high - alone.low)
    assert ratio[0] == pytest.approx(fit.widening, rel=0.15) and ratio[0] > 1.2
