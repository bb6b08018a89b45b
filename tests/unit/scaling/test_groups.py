# SPDX-License-Identifier: Apache-2.0
"""Seeds of one recipe as one curve: the interval is that of the recipe, the spread is what its seeds show."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from scalerl_verl.scaling import CurveFit, fit_curve, sigmoid
from scalerl_verl.scaling.fit.groups import RUN_SPREAD, GroupFit, mean_ceiling, own_variance
from scalerl_verl.scaling.fit.result import IDENTIFIED, Trouble

DRAWS = 4000
OWN = 0.003


@pytest.fixture(scope="module")
def fit() -> CurveFit:
    compute = np.linspace(1500, 50000, 40)
    noise = np.random.default_rng(0).normal(0, 0.002, 40)
    return fit_curve(compute, sigmoid(compute, 0.645, 1.7, 8000, 0.3) + noise, R0=0.3)


def with_A(fit: CurveFit, A: float) -> CurveFit:
    return replace(fit, A=A, A_interval=(A - 1.96 * OWN, A + 1.96 * OWN))


@pytest.mark.parametrize("seeds", [1, 2, 3, 8])
def test_interval_holds_the_recipe_s_own_ceiling(seeds: int) -> None:
    """4,000 draws: 95% is seen within 0.7% in 95 of 100 studies. With few seeds the known spread makes it wide."""
    rng = np.random.default_rng(seeds)
    inside = 0
    for _ in range(DRAWS):
        mean, (low, high) = mean_ceiling(0.645 + rng.normal(0, math.hypot(RUN_SPREAD, OWN), seeds), OWN**2, 0.95)
        inside += low <= 0.645 <= high
        assert low < mean < high
    assert 0.943 <= inside / DRAWS <= (0.995 if seeds < 3 else 0.98)


def test_seeds_that_scatter_more_than_known_widen_the_interval() -> None:
    calm = mean_ceiling([0.640, 0.645, 0.650], OWN**2, 0.95)
    wild = mean_ceiling([0.60, 0.645, 0.69], OWN**2, 0.95)
    assert calm[0] == pytest.approx(wild[0]) and wild[1][1] - wild[1][0] > 3 * (calm[1][1] - calm[1][0])


def test_group_has_means_of_its_seeds_and_both_scatters(fit: CurveFit) -> None:
    seeds = {name: with_A(fit, A) for name, A in (("a", 0.63), ("b", 0.64), ("c", 0.65))}
    seeds["c"] = replace(seeds["c"], B=fit.B * 4)
    group = GroupFit.make("base", seeds)
    assert group.A == pytest.approx(0.64) and group.spread == pytest.approx(0.01)
    assert group.B == pytest.approx(fit.B * 4 ** (1 / 3)) and group.C_mid == pytest.approx(fit.C_mid)
    assert group.within == pytest.approx(OWN, rel=1e-3) and own_variance([fit]) < OWN**2
    assert group.identified and group.verdict == IDENTIFIED
    assert group.to_dict()["members"] == ["a", "b", "c"] and group.to_dict()["group"] == "base"


def test_one_seed_shows_no_spread_and_its_interval_knows_that_of_others(fit: CurveFit) -> None:
    group = GroupFit.make("base", {"a": fit})
    assert group.spread is None
    low, high = group.A_interval
    assert low < fit.A_interval[0] - RUN_SPREAD and fit.A_interval[1] + RUN_SPREAD < high


def test_group_is_identified_only_with_all_of_its_seeds(fit: CurveFit) -> None:
    short = replace(fit, troubles=(Trouble("late_rise", "rises"),))
    group = GroupFit.make("base", {"a": fit, "b": short, "c": fit})
    assert not group.identified and group.verdict == "late_rise" and group.num_identified == 2


def test_interval_stays_a_pass_rate(fit: CurveFit) -> None:
    assert GroupFit.make("base", {"a": with_A(fit, 0.999), "b": with_A(fit, 0.997)}).A_interval[1] == 1.0


def test_group_without_a_run_is_an_error() -> None:
    with pytest.raises(ValueError, match="group base: each recipe needs one fit or more"):
        GroupFit.make("base", {})
