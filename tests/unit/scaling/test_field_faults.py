# SPDX-License-Identifier: Apache-2.0
"""Faults of curve fitting seen in the field: a number where there is none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scalerl_verl.scaling import FitRefused, Grid, fit_curve, sigmoid


@pytest.mark.parametrize("noise", [0.0, 0.003])
@pytest.mark.parametrize("spacing", [np.linspace, np.geomspace])
def test_fault_34_near_step_data_are_flagged_as_not_identified(noise, spacing):
    compute = spacing(1000.0, 50000.0, 24)
    score = np.where(compute < 9000, 0.3, 0.6) + np.random.default_rng(0).normal(0, 1, 24) * noise
    fit = fit_curve(compute, score, R0=0.3)
    assert fit.verdict == "step_like", fit.troubles
    assert all(math.isfinite(value) for value in (fit.A, fit.B, fit.C_mid, *fit.A_interval, *fit.B_interval))


GOOD = np.linspace(1.0, 8.0, 8), sigmoid(np.linspace(1.0, 8.0, 8), 0.6, 2.0, 3.0, 0.3)


def spoiled(place: int, compute: float | None = None, score: float | None = None):
    c, s = GOOD[0].copy(), GOOD[1].copy()
    if compute is not None:
        c[place] = compute
    if score is not None:
        s[place] = score
    return c, s


@pytest.mark.parametrize("method", ["profile", "paper"])
@pytest.mark.parametrize(
    ("points", "R0", "code"),
    [
        ((GOOD[0][:4], GOOD[1][:4]), 0.3, "too_few_points"),
        ((GOOD[0][:5], GOOD[1][:5]), None, "too_few_points"),
        ((GOOD[0], np.full(8, 0.4)), 0.3, "constant_score"),
        (spoiled(3, score=1.2), 0.3, "score_out_of_range"),
        (spoiled(3, score=-0.1), 0.3, "score_out_of_range"),
        (spoiled(3, compute=3.0), 0.3, "duplicate_compute"),
        (spoiled(3, compute=-4.0), 0.3, "non_positive_compute"),
        (spoiled(3, score=math.nan), 0.3, "not_finite"),
        (spoiled(3, compute=math.nan), 0.3, "not_finite"),
        (spoiled(3, compute=math.inf), 0.3, "not_finite"),
    ],
)
def test_fault_35_data_without_a_curve_are_refused_by_name(points, R0, code, method):
    with pytest.raises(FitRefused) as refusal:
        fit_curve(*points, R0=R0, method=method)
    assert refusal.value.code == code


@pytest.mark.parametrize(
    ("grid", "name"),
    [
        (Grid(A=np.arange(0.45, 0.601, 0.005)), "A"),
        (Grid(A=np.arange(0.70, 0.801, 0.005)), "A"),
        (Grid(C_mid=np.linspace(100, 6000, 60)), "C_mid"),
        (Grid(C_mid=np.linspace(10000, 40000, 60)), "C_mid"),
    ],
)
def test_fault_36_best_value_on_the_edge_of_the_grid_is_flagged(grid, name):
    compute = np.linspace(1500, 50000, 80)
    fit = fit_curve(compute, sigmoid(compute, 0.645, 1.7, 8000, 0.3), R0=0.3, method="paper", grid=grid)
    assert fit.verdict == "at_edge"
    assert any(f"best {name}" in trouble.text for trouble in fit.troubles)


def test_fault_36_best_ceiling_on_the_bound_is_flagged():
    compute = np.linspace(1.0, 12.0, 12)
    fit = fit_curve(compute, sigmoid(compute, 1.0, 2.0, 2.0, 0.3), R0=0.3)
    assert fit.verdict == "at_edge"
