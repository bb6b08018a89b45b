# SPDX-License-Identifier: Apache-2.0
"""Curves of public logs (curves/SOURCES.md): early windows that once gave a wrong ceiling give none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scalerl_verl.scaling import FitRefused, Points
from scalerl_verl.scaling.fit.fitting import fit_points
from scalerl_verl.scaling.fit.rivals import rank_past

CURVES = Path(__file__).parent / "curves"
NAMES = sorted(path.stem for path in CURVES.glob("*_*.csv") if path.stem.startswith(("verl", "damek")))
LAST_SHARE = 0.8
SLACK = 0.03
"""A run may end this far from its ceiling: noise of a batch, and what a curve still has to rise."""


def read(name: str, with_errors: bool = True) -> Points:
    table = np.genfromtxt(CURVES / f"{name}.csv", delimiter=",", names=True)
    return Points.make(table["compute"], table["score"], table["stderr"] if with_errors else None)


def first(points: Points, num: int) -> Points:
    return points.select(np.arange(len(points)) < num)


@pytest.mark.parametrize(
    ("name", "num"),
    [
        *(("verl_q0.5b_resp256_train", num) for num in (40, 49, 55, 58, 64)),
        *(("verl_q0.5b_resp512_train", num) for num in (49, 55, 70, 76, 82)),
    ],
)
@pytest.mark.parametrize("with_errors", [True, False])
def test_window_after_a_steep_rise_is_not_identified(name, num, with_errors):
    """The curve's tail follows from its rise: it calls .53 to .59 the ceiling, and the runs end at .69 and .71."""
    points = read(name, with_errors)
    fit = fit_points(first(points, num))
    assert not fit.identified
    assert points.score[int(LAST_SHARE * len(points)) :].mean() > fit.A + 0.05  # it would be wrong


@pytest.mark.parametrize("name", NAMES)
def test_identified_window_holds_what_the_run_came_to(name):
    """At ten places of each run."""
    points = read(name)
    end = points.score[int(LAST_SHARE * len(points)) :].mean()
    for num in np.unique(np.linspace(6, len(points), 10).astype(int)):
        try:
            fit = fit_points(first(points, num))
        except FitRefused:
            continue
        if fit.identified:
            assert fit.A_interval[0] - SLACK <= end <= fit.A_interval[1], num


@pytest.mark.parametrize("name", ["verl_q0.5b_resp256_val", "verl_q0.5b_resp512_val", "verl_gemma2b_ppo_val"])
def test_last_fifth_forecasts_stable_runs_better_than_every_curve(name):
    past = rank_past(read(name), None, (0.25, 0.5, 0.75))
    assert past is not None and past.best == past.better_naive == "last_fifth"
