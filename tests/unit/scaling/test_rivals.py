# SPDX-License-Identifier: Apache-2.0
"""Other curves and naive forecasts beside the sigmoid, on data whose truth is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scalerl_verl.cli import main
from scalerl_verl.scaling import FitRefused, Points, sigmoid
from scalerl_verl.scaling.fit.backtest import backtest, rank_forecasts
from scalerl_verl.scaling.fit.forms import FORMS, NAIVE, fit_exponential, fit_form, fit_last_fifth, fit_logistic
from scalerl_verl.scaling.fit.rivals import compare_held_out, rank_past

CURVES = Path(__file__).parent / "curves"
COMPUTE = np.linspace(500.0, 50000.0, 60)


def sigmoid_run(num: int = 120, noise: float = 0.005) -> Points:
    compute = np.linspace(1500.0, 50000.0, num)
    scatter = np.random.default_rng(0).normal(0, noise, num)
    return Points.make(compute, sigmoid(compute, 0.645, 1.7, 8000.0, 0.3) + scatter)


def real_run() -> Points:
    """A small model that jumps within three validations and hardly moves after that."""
    table = np.genfromtxt(CURVES / "verl_q0.5b_resp512_val.csv", delimiter=",", names=True)
    return Points.make(table["compute"], table["score"], table["stderr"])


def line_run(noise: float = 0.002) -> Points:
    compute = np.geomspace(10.0, 1000.0, 40)
    return Points.make(compute, 0.1 + 0.1 * np.log(compute) + np.random.default_rng(2).normal(0, noise, 40))


def test_sigmoid_beats_every_rival_on_its_own_data():
    held_out = {held.form: held for held in compare_held_out(sigmoid_run(), 0.3)}
    assert set(held_out) == set(FORMS)
    assert held_out["sigmoid"].rmse < min(held.rmse for form, held in held_out.items() if form != "sigmoid")
    assert held_out["sigmoid"].num_fitted + held_out["sigmoid"].num_held_out == 120


@pytest.mark.parametrize("R0", [0.3, None])
def test_logistic_in_compute_recovers_its_own_curve(R0):
    score = 0.3 + 0.3 / (1 + np.exp(-2e-4 * (COMPUTE - 15000)))
    fit = fit_logistic(Points.make(COMPUTE, score), R0)
    assert fit.A == pytest.approx(0.6, abs=2e-3) and fit.parameters["C_mid"] == pytest.approx(15000, rel=0.02)


@pytest.mark.parametrize("R0", [0.25, None])
@pytest.mark.parametrize("start", [False, True])
def test_exponential_recovers_its_own_curve(R0, start):
    compute = np.concatenate([[0.0], COMPUTE]) if start else COMPUTE
    fit = fit_exponential(Points.make(compute, 0.6 - 0.35 * np.exp(-compute / 9000)), R0)
    assert fit.A == pytest.approx(0.6, abs=1e-4) and fit.parameters["R0"] == pytest.approx(0.25, abs=1e-4)
    assert fit.parameters["tau"] == pytest.approx(9000, rel=1e-3)
    assert fit.curve(20000.0) == pytest.approx(0.6 - 0.35 * np.exp(-20 / 9), abs=1e-4)


def test_line_in_log_compute_is_the_least_squares_line_and_stays_a_pass_rate():
    points = line_run()
    stderr = np.linspace(0.01, 0.03, len(points))
    fit = fit_form("log_line", Points.make(points.compute, points.score, stderr), None)
    slope, at_1 = np.polyfit(np.log(points.compute), points.score, 1, w=1 / stderr)
    assert fit.parameters == {"at_1": pytest.approx(at_1), "slope": pytest.approx(slope)}
    assert fit.curve(1e30) == 1.0 and fit.curve(1e-30) == 0.0


def test_last_fifth_is_a_mean_of_the_last_points_by_their_weights():
    score, stderr = np.linspace(0.1, 0.5, 10), np.full(10, 0.01)
    stderr[-1] = 0.02
    fit = fit_last_fifth(Points.make(np.arange(1.0, 11.0), score, stderr))
    assert fit.curve([20.0, 30.0]) == pytest.approx((4 * score[-2] + score[-1]) / 5)
    assert fit_last_fifth(Points.make([1.0, 2.0], [0.1, 0.2])).A == pytest.approx(0.2)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "sigmoid"])
def test_too_few_points_are_refused_and_not_interpolated(form):
    with pytest.raises(FitRefused, match="needs"):
        fit_form(form, Points.make([1.0, 2.0], [0.1, 0.2]), None)


@pytest.mark.parametrize(("points", "best"), [(real_run(), "last_fifth"), (line_run(), "log_line")])
def test_backtest_says_which_naive_forecast_would_have_been_best(points, best):
    forecasts = backtest(points)
    ranking = rank_forecasts(forecasts)
    assert ranking is not None and ranking.best == ranking.better_naive == best
    for forecast in forecasts:
        assert forecast.best is not None
        assert forecast.best.rmse == min(held.rmse for held in forecast.rivals)
        assert forecast.rivals[0].form == "sigmoid" and forecast.rivals[0].rmse == pytest.approx(forecast.rmse)
    assert ranking.rmse[best] == pytest.approx(
        np.sqrt(np.mean([held.rmse**2 for f in forecasts for held in f.rivals if held.form == best]))
    )


def test_sigmoid_is_best_over_all_shares_on_its_own_data():
    ranking = rank_forecasts(backtest(sigmoid_run(), R0=0.3))
    assert ranking is not None and ranking.best == "sigmoid" and ranking.better_naive is None


def test_shares_at_which_a_form_was_refused_are_not_ranked_but_have_a_best():
    early, late = backtest(sigmoid_run(24), shares=[0.2, 0.5])
    assert early.fit is None and early.best is not None and early.best.form in (*NAIVE, "power_law", "exponential")
    ranking = rank_forecasts([early, late])
    assert ranking is not None and ranking.shares == (0.5,)
    assert rank_forecasts([early]) is None


def test_past_of_a_run_is_ranked_as_its_backtest():
    points = real_run()
    past, tested = rank_past(points, None, (0.25, 0.5, 0.75)), rank_forecasts(backtest(points))
    assert past is not None and tested is not None
    assert past.shares == tested.shares and past.rmse == pytest.approx(tested.rmse)


REAL = str(CURVES / "verl_q0.5b_resp512_val.csv")


def write(points: Points, path: Path) -> str:
    rows = [f"{compute},{score}" for compute, score in zip(points.compute, points.score, strict=True)]
    path.write_text("\n".join(["compute,score", *rows]), encoding="utf-8")
    return str(path)


def test_predict_warns_where_a_naive_forecast_was_better_and_only_there(tmp_path, capsys):
    main(["predict", REAL, write(sigmoid_run(), tmp_path / "curve.csv"), "--names", "real", "curve"])
    real, curve = capsys.readouterr().out.split("\ncurve\n")
    assert "Warning" in real and FORMS["last_fifth"] in real and "Warning" not in curve


def test_json_has_every_form_at_every_share_and_the_best_over_all(capsys):
    main(["backtest", REAL, "--json", "--shares", "0.05", "0.5"])
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert [forecast["best"] for forecast in found["forecasts"]] == [None, "last_fifth"]
    assert [held["form"] for held in found["forecasts"][1]["rivals"]] == list(FORMS)
    assert found["overall"]["best"] == found["overall"]["better_naive"] == "last_fifth"
    main(["predict", REAL, "--json"])
    past = json.loads(capsys.readouterr().out)["runs"][0]["past"]
    assert past["better_naive"] == "last_fifth" and set(past["rmse"]) == set(FORMS)
