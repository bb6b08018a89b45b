# SPDX-License-Identifier: Apache-2.0
"""Comparisons: equal recipes rarely have a winner, different ones do."""

from __future__ import annotations

import numpy as np
import pytest

from scalerl_verl.scaling import fit_curve, sigmoid
from scalerl_verl.scaling.fit.compare import (
    RUN_SPREAD,
    compare_groups,
    compare_pair,
    difference_interval,
    group_difference,
    widen_by_runs,
)

DRAWS = 4000
OWN = 0.003
"""Standard error of A of one run, from the points of the run."""


def ceilings(rng: np.random.Generator, num: int, mean: float = 0.645) -> np.ndarray:
    return mean + rng.normal(0, np.hypot(RUN_SPREAD, OWN), num)


def winners(shift: float, seeds: int) -> float:
    """Share of comparisons with a winner, of recipes whose ceilings differ by `shift`."""
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(DRAWS):
        _, (low, high), _ = group_difference(
            ceilings(rng, seeds), ceilings(rng, seeds, 0.645 + shift), OWN**2, level=0.95
        )
        found += low > 0 or high < 0
    return found / DRAWS


def test_equal_recipes_with_three_seeds_have_a_winner_in_at_most_5_of_100():
    """4,000 draws: 5% is seen within 0.7% in 95 of 100 studies."""
    assert 0.02 <= winners(0.0, 3) <= 0.05


def test_recipes_that_differ_by_more_than_the_tie_are_told_apart_with_three_seeds():
    assert winners(0.03, 3) > 0.95


def test_equal_recipes_with_one_run_each_have_a_winner_in_at_most_5_of_100():
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(DRAWS):
        (A_1,), (A_2,) = ceilings(rng, 1), ceilings(rng, 1)
        alone = difference_interval(
            A_1, (A_1 - 1.96 * OWN, A_1 + 1.96 * OWN), A_2, (A_2 - 1.96 * OWN, A_2 + 1.96 * OWN)
        )
        low, high = widen_by_runs(A_1 - A_2, alone, RUN_SPREAD, 0.95)
        found += low > 0 or high < 0
    assert found / DRAWS <= 0.057


def test_spread_of_seeds_that_is_larger_than_expected_counts():
    narrow = group_difference([0.640, 0.645, 0.650], [0.600, 0.605, 0.610], OWN**2, 0.95)
    wide = group_difference([0.60, 0.645, 0.69], [0.56, 0.605, 0.65], OWN**2, 0.95)
    assert narrow[0] == pytest.approx(wide[0]) and narrow[1][0] > 0 > wide[1][0]
    assert wide[2] > RUN_SPREAD > narrow[2]


def draw(A: float, B: float, seed: int):
    compute = np.linspace(1500, 50000, 40)
    return fit_curve(
        compute, sigmoid(compute, A, B, 8000, 0.3) + np.random.default_rng(seed).normal(0, 0.002, 40), R0=0.3
    )


def test_groups_of_fits_are_compared_by_their_means():
    one, two = [draw(0.65, 1.7, seed) for seed in (1, 2)], [draw(0.60, 1.7, seed) for seed in (3, 4)]
    pair = compare_groups("one", one, "two", two)
    assert pair.winner == "one" and pair.trusted and pair.difference == pytest.approx(0.05, abs=0.01)
    assert compare_groups("one", one, "two", one).winner is None
    with pytest.raises(ValueError, match="one fit or more"):
        compare_groups("one", one, "two", [])


def test_runs_that_differ_by_their_seeds_have_no_winner_by_intervals():
    for seed in range(2):
        pair = compare_pair("one", draw(0.649, 1.7, seed), "two", draw(0.6415, 1.7, seed + 10))
        assert pair.tied and pair.interval_winner is None
