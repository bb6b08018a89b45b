# SPDX-License-Identifier: Apache-2.0
"""Properties of the fit over random curves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_verl.scaling import FitRefused, Grid, fit_curve, sigmoid
from scalerl_verl.scaling.fit.compare import difference_interval
from scalerl_verl.scaling.fit.curve import invert, linear_form
from scalerl_verl.scaling.fit.prediction import predict

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)
GRID = Grid(A=np.arange(0.45, 0.801, 0.025), C_mid=np.linspace(100, 40000, 30))


@st.composite
def curves(draw):
    """Compute, score and R0: a curve anywhere, steep or flat, with any noise, or no curve at all."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num = draw(st.integers(6, 60))
    compute = np.sort(rng.choice(np.linspace(300, 60000, 400), num, replace=False))
    R0 = draw(st.floats(0.0, 0.44))
    A = draw(st.floats(R0, 1.0))
    B, C_mid = np.exp(draw(st.floats(-1.5, 3.5))), np.exp(draw(st.floats(5.0, 12.0)))
    noise = draw(st.sampled_from([0.0, 1e-4, 0.01, 0.1]))
    score = np.clip(sigmoid(compute, A, B, C_mid, R0) + rng.normal(0, 1, num) * noise, 0, 1)
    return compute, score, R0


@SETTINGS
@given(curves(), st.booleans())
def test_default_fit_is_never_worse_than_the_papers_grid(curve, given_R0):
    compute, score, R0 = curve
    try:
        fit = fit_curve(compute, score, R0=R0 if given_R0 else None)
        paper = fit_curve(compute, score, R0=R0 if given_R0 else None, method="paper", grid=GRID)
    except FitRefused:
        assert np.ptp(score) == 0
        return
    assert fit.sse <= paper.sse * (1 + 1e-6) + 1e-12


@SETTINGS
@given(curves())
def test_result_is_sane(curve):
    compute, score, R0 = curve
    try:
        fit = fit_curve(compute, score, R0=R0)
    except FitRefused:
        assert np.ptp(score) == 0
        return
    assert R0 <= fit.A <= 1 and fit.B > 0 and fit.C_mid > 0
    for value, (low, high) in ((fit.A, fit.A_interval), (fit.B, fit.B_interval), (fit.C_mid, fit.C_mid_interval)):
        assert np.isfinite([low, high]).all() and low <= value * (1 + 1e-9) and value <= high * (1 + 1e-9)
    assert fit.identified == (fit.verdict == "identified") == (not fit.troubles)
    if fit.identified:
        assert fit.A_interval[1] - fit.A_interval[0] <= 0.1


@SETTINGS
@given(curves(), st.floats(-9.0, 9.0))
def test_unit_of_compute_does_not_matter(curve, log_unit):
    compute, score, R0 = curve
    if np.ptp(score) == 0:
        return
    unit = float(np.exp(log_unit))
    fit, scaled = fit_curve(compute, score, R0=R0), fit_curve(compute * unit, score, R0=R0)
    assert scaled.sse == pytest.approx(fit.sse, rel=1e-6, abs=1e-12)
    assert scaled.verdict == fit.verdict
    if fit.identified:
        assert scaled.A == pytest.approx(fit.A, abs=1e-5) and scaled.C_mid == pytest.approx(fit.C_mid * unit, rel=1e-3)


@SETTINGS
@given(curves())
def test_prediction_interval_holds_the_prediction(curve):
    compute, score, R0 = curve
    if np.ptp(score) == 0:
        return
    predicted = predict(fit_curve(compute, score, R0=R0), [compute[0], compute[-1], 10 * compute[-1]])
    assert (predicted.low <= predicted.score + 1e-9).all() and (predicted.score <= predicted.high + 1e-9).all()
    assert (predicted.low >= 0).all() and (predicted.high <= 1).all()


@SETTINGS
@given(st.floats(0.35, 1.0), st.floats(0.2, 8.0), st.floats(10.0, 1e6), st.floats(0.05, 0.95))
def test_inverse_and_linear_form_belong_to_the_curve(A, B, C_mid, share):
    score = 0.3 + share * (A - 0.3)
    compute = invert(score, A, B, C_mid, 0.3)
    assert float(sigmoid(compute, A, B, C_mid, 0.3)) == pytest.approx(score, abs=1e-9)
    assert float(linear_form(score, A, 0.3)) == pytest.approx((compute / C_mid) ** B, rel=1e-6)


@SETTINGS
@given(st.floats(0.4, 0.6), st.floats(0.4, 0.6), st.floats(0.001, 0.1), st.floats(0.001, 0.1))
def test_interval_of_a_difference_turns_with_the_order(A_1, A_2, width_1, width_2):
    one, two = (A_1 - width_1, A_1 + 2 * width_1), (A_2 - width_2, A_2 + width_2)
    low, high = difference_interval(A_1, one, A_2, two)
    assert low <= A_1 - A_2 <= high
    assert difference_interval(A_2, two, A_1, one) == pytest.approx((-high, -low))
