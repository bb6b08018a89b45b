# SPDX-License-Identifier: Apache-2.0
"""Every published fit is recovered from synthetic data, and the intervals cover as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from scalerl_verl.scaling import Grid, Points, fit_curve, sigmoid
from scalerl_verl.scaling.fit.fitting import pose
from scalerl_verl.scaling.fit.forms import fit_power_law
from scalerl_verl.scaling.fit.profile import find_intervals
from scalerl_verl.scaling.fit.solver import Problems, solve
from tests.unit.scaling.published import CURVES, LONG_RUN_C_MID, R0, RECIPES

DRAWS = 500
NOISE = 0.01


@pytest.mark.parametrize("given_R0", [R0, None], ids=["R0 given", "R0 fitted"])
@pytest.mark.parametrize("name", CURVES)
def test_published_fit_is_recovered_without_noise(name, given_R0):
    compute, score, (A, B, C_mid) = CURVES[name]
    fit = fit_curve(compute, score, R0=given_R0)
    assert fit.A == pytest.approx(A, abs=0.002)
    assert fit.B == pytest.approx(B, rel=0.01) and fit.C_mid == pytest.approx(C_mid, rel=0.01)
    assert fit.identified, fit.troubles


@pytest.mark.parametrize("name", RECIPES)
def test_papers_grid_finds_the_published_fit(name):
    """On the union of the two grids its C_mid values lie on, which round down to whole hours."""
    compute, score, (A, B, C_mid) = CURVES[name]
    grid = Grid(C_mid=np.unique(np.concatenate([np.linspace(100, 4000, 100), np.linspace(4000, 40000, 100)])))
    fit = fit_curve(compute, score, R0=R0, method="paper", grid=grid)
    if name == "MoE Scout":  # its 4242 lies on neither grid: a neighbouring cell makes up for it
        assert fit.A == pytest.approx(A, abs=0.0051) and fit.C_mid == pytest.approx(C_mid, rel=0.04)
    else:
        assert fit.A == pytest.approx(A, abs=1e-9) and int(fit.C_mid) == C_mid
    assert fit.B == pytest.approx(B, rel=0.03)
    assert fit.identified, fit.troubles


def simulate(name: str, noise: float, draws: int, seed: int) -> tuple[Problems, tuple[float, float, float]]:
    compute, score, truth = CURVES[name]
    noisy = score + np.random.default_rng(seed).normal(0, noise, (draws, len(score)))
    one = pose(Points(compute, score), R0)
    return Problems(one.x, noisy, one.w, one.low, one.high), truth


@pytest.mark.parametrize("name", CURVES)
def test_intervals_cover_the_truth_in_95_of_100_draws(name):
    """500 draws: a share of .95 is seen within .03 in all but 2 of 1,000 runs; the seed is fixed."""
    problems, (A, B, C_mid) = simulate(name, NOISE, DRAWS, seed=1)
    theta, sums = solve(problems, fixed_R0=True)
    ends = find_intervals(problems, theta, sums, fixed_R0=True).ends[:, :3]
    truth = np.array([A, np.log(B), np.log(C_mid)])
    covered = ((ends[:, :, 0] <= truth) & (truth <= ends[:, :, 1])).mean(0)
    assert ((covered >= 0.92) & (covered <= 0.98)).all(), covered


def test_batched_intervals_are_those_of_single_fits():
    """Intervals of `fit_curve` are those above, widened by what it knows of the residuals' correlation."""
    problems, _ = simulate("ScaleRL", NOISE, 3, seed=2)
    theta, sums = solve(problems, fixed_R0=True)
    for row in range(3):
        fit = fit_curve(np.exp(problems.x[0]), np.clip(problems.y[row], 0, 1), R0=R0)
        widening = np.repeat(fit.correlation.widening(np.eye(4), 0.95)[None], 3, axis=0)
        ends = find_intervals(problems, theta, sums, fixed_R0=True, widening=widening).ends
        assert fit.A_interval == pytest.approx(tuple(ends[row, 0]), abs=1e-4)
        assert fit.C_mid_interval == pytest.approx(tuple(np.exp(ends[row, 2])), rel=1e-3)


REPORTED = {50000: (0.643, 0.649), 16000: (0.637, 0.688), 8000: (0.530, 0.805), 4000: (0.425, 1.0)}
"""95% intervals of A by end of the window: A .645, B 1.70, C_mid 8000, R0 .30, noise .005, 198 points, 1.5k to 50k."""


@pytest.mark.parametrize("last", REPORTED)
def test_reported_identifiability_is_that_of_a_usual_draw(last):
    """The noise that was drawn is not known: each reported end lies in the middle 98% of the ends over many draws."""
    compute = np.linspace(1500, 50000, 198)
    compute = compute[compute <= last]
    score = sigmoid(compute, 0.645, 1.70, LONG_RUN_C_MID, R0)
    noisy = score + np.random.default_rng(3).normal(0, 0.005, (200, len(compute)))
    one = pose(Points(compute, score), R0)
    problems = Problems(one.x, noisy, one.w, one.low, one.high)
    theta, sums = solve(problems, fixed_R0=True)
    ends = find_intervals(problems, theta, sums, fixed_R0=True, columns=(0,)).ends[:, 0]
    for side in (0, 1):
        low, high = np.percentile(ends[:, side], [1, 99])
        assert low - 5e-4 <= REPORTED[last][side] <= high + 5e-4, (side, low, high)


@pytest.mark.parametrize("last", REPORTED)
def test_short_window_is_called_not_identified(last):
    compute = np.linspace(1500, 50000, 198)
    score = sigmoid(compute, 0.645, 1.70, LONG_RUN_C_MID, R0) + np.random.default_rng(4).normal(0, 0.005, 198)
    keep = compute <= last
    fit = fit_curve(compute[keep], score[keep], R0=R0)
    assert fit.identified == (last >= 16000), fit.troubles
    if last <= 8000:
        assert {"window_ends_near_C_mid", "interval_too_wide"} <= {trouble.code for trouble in fit.troubles}


@pytest.mark.parametrize("window", [(1500, 50000), (5000, 50000)])
def test_power_law_overestimates_the_ceiling_early(window):
    """The paper reports A = 1.0 and .74 on its data for a run that ends at .645."""
    compute = np.linspace(*window, 100)
    fit = fit_power_law(Points(compute, sigmoid(compute, 0.645, 1.70, LONG_RUN_C_MID, R0)))
    assert fit.A > 0.645 + 0.04
