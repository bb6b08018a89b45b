# SPDX-License-Identifier: Apache-2.0
"""Comparisons: equal recipes rarely have a winner, different ones do."""

from __future__ import annotations

import numpy as np
import pytest

from scalerl_verl.scaling import fit_curve, sigmoid
from scalerl_verl.scaling.fit.compare import (
    compare_all,
    compare_groups,
    compare_pair,
    difference_interval,
    group_difference,
    leave_one_out,
    widen_by_runs,
)
from scalerl_verl.scaling.fit.groups import RUN_SPREAD, GroupFit

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


def group(name: str, A: float, B: float, *seeds: int) -> GroupFit:
    return GroupFit.make(name, {f"{name}.{seed}": draw(A, B, seed) for seed in seeds})


def test_groups_of_fits_are_compared_by_their_means_and_both_rules():
    one, two = group("one", 0.65, 1.7, 1, 2), group("two", 0.60, 1.7, 3, 4)
    pair = compare_groups(one, two)
    assert pair.paper_winner == pair.interval_winner == "one" and pair.trusted and not pair.tied
    assert pair.difference == pytest.approx(one.A - two.A) == pytest.approx(0.05, abs=0.01)
    assert (pair.num_first, pair.num_second) == (2, 2) and pair.spread == pytest.approx(RUN_SPREAD, rel=0.4)


def test_tie_of_groups_is_broken_by_the_paper_s_rule_alone():
    slow, quick = group("slow", 0.645, 1.4, 1, 2, 3), group("quick", 0.645, 1.9, 4, 5, 6)
    pair = compare_groups(slow, quick)
    assert pair.tied and pair.common_A == pytest.approx((slow.A + quick.A) / 2)
    assert pair.paper_winner == "quick" and pair.interval_winner is None
    for B, (low, high), given in (
        (pair.B_first, pair.B_first_interval, 1.4),
        (pair.B_second, pair.B_second_interval, 1.9),
    ):
        assert low < B < high and B == pytest.approx(given, rel=0.1)
    alone = compare_groups(group("slow", 0.645, 1.4, 1), group("quick", 0.645, 1.9, 4))
    single = compare_pair("slow", draw(0.645, 1.4, 1), "quick", draw(0.645, 1.9, 4))
    assert alone.B_first == single.B_first and alone.B_first_interval == single.B_first_interval


def test_leave_one_out_takes_groups_as_it_takes_runs():
    groups = {g.name: g for g in (group("base", 0.645, 1.7, 1, 2), group("far", 0.60, 1.7, 3, 4))}
    base, far = leave_one_out(groups, "base")
    assert base.delta_A == 0 and far.delta_A == pytest.approx(groups["far"].A - groups["base"].A)
    assert base.B_common is not None and far.B_common is None
    assert [pair.interval_winner for pair in compare_all(groups)] == ["base"]


def test_runs_that_differ_by_their_seeds_have_no_winner_by_intervals():
    for seed in range(2):
        pair = compare_pair("one", draw(0.649, 1.7, seed), "two", draw(0.6415, 1.7, seed + 10))
        assert pair.tied and pair.interval_winner is None
