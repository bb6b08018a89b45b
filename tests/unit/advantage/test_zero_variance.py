# SPDX-License-Identifier: Apache-2.0
"""Classification of groups: the exact definition, float noise, any sizes, any order, padding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_verl.advantage import classify_groups


def kinds_by_id(rewards, ids, trains=None) -> dict:
    trains = np.ones(len(rewards), dtype=bool) if trains is None else np.array(trains)
    stats = classify_groups(np.array(rewards, dtype=np.float64), np.array(ids, dtype=object), trains)
    return {ids[i]: stats.kind_P[p] for i, p in enumerate(stats.group_index_B) if p >= 0}


def test_every_kind_is_counted():
    ids = ["mixed", "right", "wrong", "one", "mixed", "right", "wrong", "zero", "zero", "padding"]
    rewards = [1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 0.0, 0.0, 7.0]
    trains = [True] * 9 + [False]
    assert kinds_by_id(rewards, ids, trains) == {
        "mixed": "mixed",
        "right": "all_right",
        "wrong": "all_wrong",
        "one": "single",
        "zero": "all_wrong",
    }
    stats = classify_groups(np.array(rewards), ids, np.array(trains))
    assert stats.kept_B.tolist() == [True, False, False, False, True] + [False] * 5
    assert (stats.num_groups, stats.num_mixed, stats.num_all_right, stats.num_all_wrong) == (5, 1, 1, 2)
    assert (stats.num_single, stats.num_rows, stats.num_rows_kept) == (1, 9, 2)
    assert stats.size_P.tolist() == [2, 2, 2, 1, 2]
    assert stats.mean_P.tolist() == [0.0, 1.0, -1.0, 1.0, 0.0]
    assert stats.group_index_B[-1] == -1


@pytest.mark.fault("group of one, std of 0, float noise of equal rewards: huge or NaN advantages")
@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 1e6 / 3, -0.7])
@pytest.mark.parametrize("size", [3, 5, 7, 16])
def test_float_noise_of_equal_rewards_counts_as_zero_variance(value, size):
    kind = "all_right" if value > 0 else "all_wrong"
    assert kinds_by_id([value] * size, ["x"] * size) == {"x": kind}
    # As summed in FP32: one rounding apart.
    noisy = np.full(size, value, dtype=np.float32)
    noisy[0] = np.nextafter(noisy[0], np.float32(np.inf))
    assert kinds_by_id(noisy.astype(np.float64), ["x"] * size) == {"x": kind}


def test_the_standard_deviation_of_equal_rewards_is_not_zero():
    """Why the range is compared; if this fails NumPy has changed and the comment in the code is stale."""
    assert 0.0 < np.std([0.1] * 3) < 1e-16


def test_small_but_meant_differences_are_kept():
    assert kinds_by_id([0.5, 0.5, 0.50001], ["x"] * 3) == {"x": "mixed"}
    assert kinds_by_id([1e-9, -1e-9], ["x"] * 2) == {"x": "mixed"}


def test_rows_that_do_not_train_change_no_kind():
    ids, rewards = ["a", "a", "a", "b", "b"], [1.0, 1.0, -1.0, -1.0, np.nan]
    assert kinds_by_id(rewards, ids, [True, True, False, True, False]) == {"a": "all_right", "b": "single"}


def test_nothing_trains():
    stats = classify_groups(np.full(3, np.nan), ["a", "b", "c"], np.zeros(3, dtype=bool))
    assert stats.kind_P == () and stats.num_groups == stats.num_rows == 0 and not stats.kept_B.any()
    assert classify_groups(np.zeros(0), [], np.zeros(0, dtype=bool)).num_groups == 0


@pytest.mark.parametrize("ids", [np.array([7, 3, 7, 3]), np.array(["u", "v", "u", "v"]), ["u", 3, "u", 3]])
def test_ids_of_any_hashable_type(ids):
    stats = classify_groups([1.0, 1.0, -1.0, 1.0], ids, np.ones(4, dtype=bool))
    assert stats.kind_P == ("mixed", "all_right")
    assert stats.group_index_B.tolist() == [0, 1, 0, 1]


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from([-1.0, 0.1, 1.0]), st.booleans()), min_size=1, max_size=24
    ),
    shuffle=st.randoms(use_true_random=False),
)
def test_independent_of_order_and_padding(rows, shuffle):
    ids, rewards, trains = map(list, zip(*rows, strict=True))
    expected = classify_groups(rewards, ids, trains_B=np.array(trains))
    order = list(range(len(rows)))
    shuffle.shuffle(order)
    permuted = classify_groups(
        [rewards[i] for i in order] + [np.nan, 5.0],
        [ids[i] for i in order] + [ids[0], "padding"],
        np.array([trains[i] for i in order] + [False, False]),
    )
    assert permuted.kept_B[: len(order)].tolist() == expected.kept_B[order].tolist()
    assert sorted(permuted.kind_P) == sorted(expected.kind_P)
    assert permuted.num_rows_kept == expected.num_rows_kept
    for p, kind in enumerate(expected.kind_P):
        values = [rewards[i] for i in np.flatnonzero(expected.group_index_B == p)]
        equal = "all_right" if values[0] > 0 else "all_wrong"
        assert kind == ("single" if len(values) == 1 else "mixed" if len(set(values)) > 1 else equal)


def test_refuses_nonfinite_rewards_of_rows_that_train():
    for junk in (np.nan, np.inf, -np.inf):
        with pytest.raises(ValueError, match="first row 1"):
            classify_groups([1.0, junk], ["a", "a"], np.ones(2, dtype=bool))


def test_refuses_lengths_that_differ_and_masks_that_are_indices():
    with pytest.raises(ValueError, match="group ids"):
        classify_groups([1.0, 1.0], ["a"], np.ones(2, dtype=bool))
    with pytest.raises(ValueError, match="rewards_B"):
        classify_groups([[1.0], [1.0]], ["a", "a"], np.ones(2, dtype=bool))
    with pytest.raises(ValueError, match="bool"):
        classify_groups([1.0, 1.0], ["a", "a"], np.array([1, 0]))
