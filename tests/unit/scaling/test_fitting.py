# SPDX-License-Identifier: Apache-2.0
"""The sigmoid and its fit: known parameters come back, and data that cannot identify A are told apart."""

import dataclasses

import numpy as np
import pytest

from scalerl_verl.scaling import FitRefused, fit_curve, sigmoid


def test_sigmoid_has_the_values_of_equation_1():
    assert sigmoid(0.0, 0.8, 1.5, 100.0, 0.3) == 0.3
    assert sigmoid(100.0, 0.8, 1.5, 100.0, 0.3) == pytest.approx(0.55, abs=1e-15)
    assert sigmoid(400.0, 0.8, 1.5, 100.0, 0.3) == pytest.approx(0.3 + 0.5 / (1 + 0.25**1.5), abs=1e-15)
    assert sigmoid(1e300, 0.8, 10.0, 1.0, 0.3) == pytest.approx(0.8, abs=1e-15)


@pytest.mark.parametrize(("compute", "B", "C_mid"), [(1.0, 0.0, 1.0), (1.0, 1.0, -1.0), (-1.0, 1.0, 1.0)])
def test_sigmoid_rejects_what_the_equation_does_not_cover(compute, B, C_mid):
    with pytest.raises(ValueError):
        sigmoid(compute, 0.8, B, C_mid, 0.3)


@pytest.mark.parametrize("given_R0", [True, False])
@pytest.mark.parametrize(
    ("A", "B", "C_mid", "R0"), [(0.645, 1.70, 8000.0, 0.30), (0.8123, 1.0, 3.3e5, 0.337), (0.4, 3.0, 2.0e3, 0.05)]
)
def test_fit_recovers_noiseless_parameters(A, B, C_mid, R0, given_R0):
    compute = np.geomspace(C_mid / 10, C_mid * 10, 12)
    fit = fit_curve(compute, sigmoid(compute, A, B, C_mid, R0), R0=R0 if given_R0 else None)
    assert fit.A == pytest.approx(A, abs=1e-3)
    assert fit.B == pytest.approx(B, rel=1e-3)
    assert fit.C_mid == pytest.approx(C_mid, rel=1e-3)
    assert fit.R0 == pytest.approx(R0, abs=1e-3)
    assert fit.identified, fit.troubles
    assert fit.A_interval[0] <= A + 1e-3 and fit.A_interval[1] >= A - 1e-3
    assert fit.rmse < 1e-5
    assert fit.num_points == 12


def test_fit_does_not_depend_on_the_order_of_points():
    compute = np.geomspace(1e3, 1e5, 9)
    score = sigmoid(compute, 0.7, 1.4, 9e3, 0.3)
    assert fit_curve(compute[::-1], score[::-1], R0=0.3) == fit_curve(compute, score, R0=0.3)


def test_interval_covers_the_true_ceiling_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    compute = np.linspace(0.5, 8.0, 10)
    truth = sigmoid(compute, 0.7, 1.5, 2.0, 0.3)
    covered = 0
    for _ in range(20):
        low, high = fit_curve(compute, truth + rng.normal(0, 0.01, 10), R0=0.3).A_interval
        covered += low <= 0.7 <= high
    assert covered >= 16  # fewer has a probability below 0.3% if the interval is right


def test_window_that_ends_before_the_bend_is_not_identified():
    rng = np.random.default_rng(1)
    compute = np.linspace(0.1, 1.0, 12)
    score = sigmoid(compute, 0.645, 1.7, 2.0, 0.3) + rng.normal(0, 0.005, 12)
    fit = fit_curve(compute, score, R0=0.3)
    assert not fit.identified
    assert fit.A_interval[1] - fit.A_interval[0] > 0.1
    assert any("ceilings from" in trouble.text for trouble in fit.troubles)


def test_ceiling_on_the_edge_of_the_grid_is_not_identified():
    compute = np.linspace(1.0, 5.0, 10)
    fit = fit_curve(compute, sigmoid(compute, 1.0, 2.0, 2.0, 0.3), R0=0.3)
    assert not fit.identified
    assert "edge" in fit.explain()


def test_falling_scores_are_not_identified():
    fit = fit_curve([1, 2, 3, 4, 5, 6], [0.30, 0.28, 0.27, 0.25, 0.24, 0.2], R0=0.32)
    assert not fit.identified


def test_window_that_ends_before_the_midpoint_is_not_identified():
    compute = np.linspace(1.0, 20.0, 12)
    fit = fit_curve(compute, sigmoid(compute, 0.7, 2.0, 30.0, 0.3), R0=0.3)
    assert fit.verdict == "window_ends_near_C_mid", fit.troubles
    assert "C_mid" in fit.explain()


GOOD = ([1.0, 2.0, 3.0, 4.0, 5.0], [0.4, 0.5, 0.55, 0.57, 0.58], 0.3)


@pytest.mark.parametrize(
    ("compute", "score", "R0", "message"),
    [
        (GOOD[0][:4], GOOD[1][:4], 0.3, "4 points"),
        ([0.0, *GOOD[0][1:]], GOOD[1], None, "4 points .* needs 5 beside the score before training"),
        ([-1.0, *GOOD[0][1:]], GOOD[1], 0.3, "positive"),
        ([2.0, *GOOD[0][1:]], GOOD[1], 0.3, r"2 times \(point 1, point 2\)"),
        (GOOD[0], [0.5] * 5, 0.3, "constant"),
        (GOOD[0], [float("nan"), *GOOD[1][1:]], 0.3, "NaN"),
        ([float("nan"), *GOOD[0][1:]], GOOD[1], 0.3, "NaN"),
        (GOOD[0], [1.2, *GOOD[1][1:]], 0.3, "between 0 and 1"),
        (GOOD[0], [-0.2, *GOOD[1][1:]], 0.3, "between 0 and 1"),
        (GOOD[0], GOOD[1][:4], 0.3, "one length"),
        (GOOD[0], GOOD[1], 1.0, "R0"),
        (GOOD[0], GOOD[1], float("nan"), "R0"),
    ],
)
def test_fit_refuses_and_says_why(compute, score, R0, message):
    with pytest.raises(FitRefused, match=message):
        fit_curve(compute, score, R0=R0)


def test_five_points_are_enough_to_try_and_the_result_is_immutable():
    fit = fit_curve(GOOD[0], GOOD[1], R0=GOOD[2])
    assert fit.num_points == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        fit.A = 0.5


def test_score_before_training_is_an_observation_and_a_given_R0_is_exact():
    compute = np.concatenate([[0.0], np.linspace(1500, 50000, 60)])
    score = sigmoid(compute, 0.645, 1.7, 8000, 0.3) + np.random.default_rng(0).normal(0, 0.005, 61)
    score[0] = 0.35  # ten times the noise from the truth
    observed, given = fit_curve(compute, score), fit_curve(compute, score, R0=0.3)
    assert observed.R0_source == "observed" and observed.num_points == 60 and observed.dof == 57
    assert 0.3 < observed.R0 < 0.35 and observed.R0_interval[0] < 0.35 < observed.R0_interval[1] + 0.03
    assert given == fit_curve(compute[1:], score[1:], R0=0.3) and given.R0_source == "given"
    assert fit_curve(compute[1:], score[1:]).R0_source == "fitted"


def test_weight_of_the_score_before_training_is_that_of_its_standard_error():
    compute = np.concatenate([[0.0], np.linspace(1500, 50000, 60)])
    score = sigmoid(compute, 0.645, 1.7, 8000, 0.3) + np.random.default_rng(0).normal(0, 0.005, 61)
    score[0] = 0.35
    stderr = np.full(61, 0.005)
    fits = [fit_curve(compute, score, np.concatenate([[first], stderr[1:]])) for first in (0.0005, 0.005, 0.5)]
    assert fits[0].R0 > fits[1].R0 > fits[2].R0
    assert fits[0].R0 == pytest.approx(0.35, abs=0.005)
    assert fits[2].R0 == pytest.approx(fit_curve(compute[1:], score[1:]).R0, abs=0.003)


def test_papers_method_takes_the_score_before_training_as_exact():
    compute = np.concatenate([[0.0], np.linspace(1500, 50000, 60)])
    score = sigmoid(compute, 0.645, 1.7, 8000, 0.3)
    assert fit_curve(compute, score, method="paper") == fit_curve(compute[1:], score[1:], R0=0.3, method="paper")


def test_intervals_with_an_observed_R0_cover_the_ceiling():
    """100 draws: fewer than 88 have a probability of 0.1% if the intervals hold 95%; an exact R0 covers in about 77."""
    rng = np.random.default_rng(1)
    compute = np.concatenate([[0.0], np.geomspace(1500, 50000, 24)])
    truth = sigmoid(compute, 0.645, 1.7, 8000, 0.3)
    covered = 0
    for _ in range(100):
        low, high = fit_curve(compute, truth + rng.normal(0, 0.01, 25)).A_interval
        covered += low <= 0.645 <= high
    assert covered >= 88
