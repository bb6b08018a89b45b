# SPDX-License-Identifier: Apache-2.0
"""The quick search of the paper's grid against the literal loop of curve_fit calls."""

from __future__ import annotations

import numpy as np
import pytest

from scalerl_verl.scaling import FitRefused, Grid, fit_curve, sigmoid
from scalerl_verl.scaling.fit.paper_grid import search, search_literally

SMALL = Grid(A=np.arange(0.45, 0.801, 0.025), C_mid=np.linspace(100, 40000, 25))


@pytest.mark.parametrize("seed", range(4))
def test_quick_search_finds_the_cell_of_the_literal_loop(seed):
    rng = np.random.default_rng(seed)
    compute = np.linspace(1500, 50000, 50)
    score = sigmoid(compute, rng.uniform(0.5, 0.75), rng.uniform(1, 2.5), rng.uniform(2000, 15000), 0.3)
    score = score + rng.normal(0, 0.01, 50)
    literal, quick = search_literally(compute, score, 0.3, SMALL), search(compute, score, 0.3, SMALL)
    assert quick.sse <= literal.sse * (1 + 1e-9)
    assert (quick.A, quick.C_mid) == (literal.A, literal.C_mid)
    assert quick.B == pytest.approx(literal.B, rel=1e-4)
    # The whole table, where the literal loop has found its minimum: finished cells exactly, others by the parabola.
    assert np.nanmin(quick.sums_AC) == pytest.approx(quick.sse)
    assert np.nanmedian(np.abs(quick.sums_AC - literal.sums_AC) / literal.sums_AC) < 0.05


def test_papers_grid_is_the_default():
    grid = Grid()
    assert (grid.A[0], grid.A[-1], len(grid.A)) == (0.45, 0.8, 71)
    assert (grid.C_mid[0], grid.C_mid[-1], len(grid.C_mid)) == (100.0, 40000.0, 100)


@pytest.mark.parametrize(
    "values", [{"A": [0.5]}, {"A": [0.6, 0.5]}, {"A": [0.5, 1.2]}, {"C_mid": [0.0, 1.0]}, {"C_mid": [[1.0, 2.0]]}]
)
def test_grid_that_means_nothing_is_refused(values):
    with pytest.raises(ValueError, match="grid of"):
        Grid(**values)


def test_grid_below_R0_is_refused():
    compute = np.linspace(1.0, 9.0, 9)
    with pytest.raises(FitRefused, match="at or below R0"):
        fit_curve(compute, sigmoid(compute, 0.95, 2, 3, 0.85), R0=0.85, method="paper")


def test_R0_is_fitted_with_B_when_it_is_not_given():
    compute = np.linspace(500, 50000, 60)
    fit = fit_curve(compute, sigmoid(compute, 0.65, 1.7, 8000, 0.25), method="paper", grid=SMALL)
    assert fit.A == pytest.approx(0.65) and fit.R0 == pytest.approx(0.25, abs=0.03)
