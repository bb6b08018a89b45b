# SPDX-License-Identifier: Apache-2.0
"""Verdicts, bootstrap, prediction, comparison and backtest on curves whose truth is known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from scalerl_verl.scaling import FitRefused, Points, fit_curve, sigmoid
from scalerl_verl.scaling.fit.backtest import backtest
from scalerl_verl.scaling.fit.bootstrap import bootstrap
from scalerl_verl.scaling.fit.compare import compare_all, compare_pair, leave_one_out
from scalerl_verl.scaling.fit.fitting import fit_points
from scalerl_verl.scaling.fit.prediction import add_noise, compute_to_reach, predict, worth_going_on
from scalerl_verl.scaling.fit.verdicts import CODES


def draw(A=0.645, B=1.7, C_mid=8000.0, noise=0.005, num=60, last=50000.0, seed=0, first=1500.0):
    compute = np.linspace(first, last, num)
    return compute, sigmoid(compute, A, B, C_mid, 0.3) + np.random.default_rng(seed).normal(0, noise, num)


def codes(fit):
    return [trouble.code for trouble in fit.troubles]


def test_unstable_run_is_called_not_monotone():
    compute, score = draw()
    score[40:] -= np.linspace(0, 0.15, 20)
    fit = fit_curve(compute, score, R0=0.3)
    assert fit.verdict == "not_monotone" and "falls by 0.1" in fit.explain()


@pytest.mark.parametrize("seed", range(30))
def test_noise_is_not_called_unstable(seed):
    assert "not_monotone" not in codes(fit_curve(*draw(noise=0.02, seed=seed), R0=0.3))


def test_early_regime_is_found_and_the_cut_that_is_proposed_removes_it():
    compute, score = draw(num=80, first=250.0)
    score[compute < 4000] += 0.10  # another curve before the first epoch ends
    fit = fit_curve(compute, score)
    assert "early_regime" in codes(fit)
    cut = fit_curve(compute, score, warm_up=7500)
    assert cut.A == pytest.approx(0.645, abs=0.02) and "early_regime" not in codes(cut)


@pytest.mark.parametrize("seed", range(30))
def test_early_regime_is_not_seen_where_there_is_none(seed):
    assert "early_regime" not in codes(fit_curve(*draw(first=250.0, seed=seed), R0=0.3))


def test_rise_without_a_bend_is_called_non_saturating():
    compute = np.geomspace(100, 10000, 30)
    score = sigmoid(compute, 1.0, 0.8, 50000, 0.3) + np.random.default_rng(0).normal(0, 0.003, 30)
    assert fit_curve(compute, score, R0=0.3).verdict == "non_saturating"


def test_few_points_have_a_verdict_of_their_own():
    assert fit_curve(*draw(num=6, noise=0.0), R0=0.3).verdict == "too_few_points"


def test_every_verdict_is_explained():
    assert next(iter(CODES)) == "identified" and all(len(text) > 10 for text in CODES.values())


def test_warm_up_cut_leaves_points_out_and_says_when_none_is_left():
    compute, score = draw()
    assert fit_curve(compute, score, R0=0.3, warm_up=10000).num_points == (compute >= 10000).sum()
    with pytest.raises(FitRefused, match="warm-up"):
        fit_curve(compute, score, R0=0.3, warm_up=1e9)


def test_standard_errors_weigh_points():
    compute, score = draw(noise=0.0)
    stderr = np.full(60, 0.005)
    score[::10] += 0.05
    stderr[::10] = 0.5
    assert fit_curve(compute, score, stderr, R0=0.3).A == pytest.approx(0.645, abs=1e-3)
    assert abs(fit_curve(compute, score, R0=0.3).A - 0.645) > 2e-3


def test_absolute_errors_set_the_width():
    compute, score = draw()
    widths = []
    for stderr in (0.005, 0.02):
        low, high = fit_curve(compute, score, np.full(60, stderr), R0=0.3, errors="absolute").A_interval
        widths.append(high - low)
    assert widths[1] == pytest.approx(4 * widths[0], rel=0.15)
    relative = [fit_curve(compute, score, np.full(60, s), R0=0.3).A_interval for s in (0.005, 0.02)]
    assert relative[0] == pytest.approx(relative[1])


@pytest.mark.parametrize(
    "wrong",
    [{"method": "magic"}, {"errors": "none"}, {"level": 1.5}, {"fixed_A": 2.0}, {"fixed_A": 0.6, "method": "paper"}],
)
def test_arguments_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError):
        fit_curve(*draw(), R0=0.3, **wrong)


def test_result_is_frozen_and_holds_its_data():
    fit = fit_curve(*draw(), R0=0.3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        fit.A = 0.5
    assert len(fit.points) == fit.num_points == 60
    assert np.sum((fit.curve(fit.points.compute) - fit.points.score) ** 2) == pytest.approx(fit.sse, rel=1e-9)


def test_bootstrap_over_points_agrees_with_the_profile():
    fit = fit_curve(*draw(), R0=0.3)
    found = bootstrap(fit, num_resamples=400, seed=1)
    assert found == bootstrap(fit, num_resamples=400, seed=1)
    width, profile = np.diff(found.A_interval)[0], np.diff(fit.A_interval)[0]
    assert 0.6 < width / profile < 1.5


def test_bootstrap_over_prompts_sees_what_points_cannot():
    """Prompts that differ a lot in difficulty, evaluated without further noise: no scatter around the curve."""
    compute, _ = draw()
    rng = np.random.default_rng(2)
    A_P = rng.uniform(0.35, 0.94, 200)
    scores = np.stack([sigmoid(compute, A, 1.7, 8000, 0.3) for A in A_P])
    fit = fit_points(Points.make(compute, scores.mean(0), None, scores), R0=0.3)
    found = bootstrap(fit, "prompts", 300)
    assert np.diff(found.A_interval)[0] == pytest.approx(2 * 1.96 * A_P.std() / 200**0.5, rel=0.2)
    assert np.diff(fit.A_interval)[0] < 1e-4
    steps = []
    bootstrap(fit, "prompts", 100, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(64, 100), (100, 100)]


def test_bootstrap_refuses_what_it_cannot_do():
    fit = fit_curve(*draw(), R0=0.3)
    with pytest.raises(FitRefused, match="validation dumps"):
        bootstrap(fit, "prompts")
    for wrong in ({"kind": "moons"}, {"num_resamples": 1}, {"block": 0, "num_resamples": 5} | {"block": 99}):
        with pytest.raises(ValueError):
            bootstrap(fit, **wrong)


def test_prediction_intervals_cover_the_curve_beyond_the_data():
    """At 4 times the data, over 200 draws: .95 is seen within .05."""
    covered = 0
    for seed in range(200):
        fit = fit_curve(*draw(last=25000.0, num=30, seed=seed), R0=0.3)
        predicted = predict(fit, [100000.0])
        covered += predicted.low[0] <= float(sigmoid(100000.0, 0.645, 1.7, 8000.0, 0.3)) <= predicted.high[0]
    assert 0.90 <= covered / 200 <= 0.99


def test_prediction_far_out_is_the_interval_of_the_ceiling():
    fit = fit_curve(*draw(last=16000.0), R0=0.3)
    predicted = predict(fit, [1e12])
    assert (predicted.low[0], predicted.high[0]) == pytest.approx(fit.A_interval, abs=2e-3)
    with pytest.raises(ValueError, match="positive"):
        predict(fit, [0.0])


def test_new_points_scatter_around_the_prediction():
    fit = fit_curve(*draw(), R0=0.3)
    predicted = predict(fit, fit.points.compute)
    low, high = add_noise(fit, predicted)
    inside = (fit.points.score >= low) & (fit.points.score <= high)
    assert inside.mean() >= 0.9 and ((high - low) > (predicted.high - predicted.low)).all()


def test_compute_to_reach_a_score():
    fit = fit_curve(*draw(noise=0.001), R0=0.3)
    reach = compute_to_reach(fit, 0.6)
    assert float(fit.curve(reach.compute)) == pytest.approx(0.6) and reach.low < reach.compute < reach.high
    never = compute_to_reach(fit, 0.9)
    assert never.compute == never.low == float("inf")
    with pytest.raises(ValueError, match="pass rate"):
        compute_to_reach(fit, 1.5)


def test_worth_of_going_on_is_the_difference_of_the_curve():
    fit = fit_curve(*draw(last=16000.0, noise=0.001), R0=0.3)
    gain = worth_going_on(fit, 32000.0)
    assert gain.gain == pytest.approx(float(fit.curve(32000.0) - fit.curve(16000.0)))
    assert gain.per_unit == pytest.approx(gain.gain / 16000)
    assert gain.marginal == pytest.approx(float(fit.curve(16001.0) - fit.curve(15999.0)) / 2, rel=1e-3)
    with pytest.raises(ValueError, match="budget"):
        worth_going_on(fit, 100.0)


def fits_of(**recipes):
    return {name: fit_curve(*draw(A=A, B=B, noise=0.002), R0=0.3) for name, (A, B) in recipes.items()}


def test_higher_ceiling_wins_by_both_rules():
    (pair,) = compare_all(fits_of(one=(0.65, 1.7), two=(0.60, 1.9)))
    assert not pair.tied and pair.paper_winner == pair.interval_winner == "one" and pair.trusted
    assert pair.difference_interval[0] <= 0.05 <= pair.difference_interval[1]


def test_tied_ceilings_are_decided_by_steepness_at_their_mean():
    fits = fits_of(slow=(0.650, 1.5), quick=(0.645, 2.0))
    pair = compare_pair("slow", fits["slow"], "quick", fits["quick"])
    assert pair.tied and pair.paper_winner == "quick"
    assert pair.common_A == pytest.approx((fits["slow"].A + fits["quick"].A) / 2)
    assert pair.B_first == pytest.approx(1.5, rel=0.1) and pair.B_second == pytest.approx(2.0, rel=0.1)


def test_same_recipe_has_no_winner_by_intervals():
    fits = {name: fit_curve(*draw(seed=seed), R0=0.3) for name, seed in (("one", 1), ("two", 2))}
    assert compare_all(fits)[0].interval_winner is None


def test_leave_one_out_has_the_reference_on_top_and_common_A_for_ties_only():
    rows = leave_one_out(fits_of(base=(0.61, 1.9), near=(0.605, 1.8), far=(0.55, 2.0)), "base")
    assert [row.name for row in rows] == ["base", "near", "far"]
    assert [row.tied for row in rows] == [True, True, False]
    assert rows[1].B_common is not None and rows[2].B_common is None
    with pytest.raises(ValueError, match="none of the recipes"):
        leave_one_out(fits_of(base=(0.61, 1.9), near=(0.605, 1.8)), "other")
    with pytest.raises(ValueError, match="two or more"):
        compare_all(fits_of(base=(0.61, 1.9)))


def test_backtest_gets_better_with_more_data_and_covers():
    points = Points.make(*draw(num=120, last=60000.0))
    forecasts = backtest(points, R0=0.3)
    assert [f.share for f in forecasts] == [0.25, 0.5, 0.75]
    assert forecasts[2].rmse <= forecasts[0].rmse
    assert all(f.coverage > 0.8 for f in forecasts[1:])
    short = backtest(points, R0=0.3, shares=[0.04])[0]
    assert short.fit is None and "points" in short.refused and short.to_dict()["rmse"] is None
    with pytest.raises(ValueError, match="shares"):
        backtest(points, shares=[1.5])
