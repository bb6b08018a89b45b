# SPDX-License-Identifier: Apache-2.0
"""Advantages: hand-computed values, and what may not change them.

The hand-computed batch: group a has rewards 1, -1, 1, 1 (mean 1/2), group b -1, 1 (mean 0), group c 1, 1 (dropped).

    centred   a: 1/2, -3/2, 1/2, 1/2   b: -1, 1
    squares   a: 3                     b: 2       std over 6 kept rows: sqrt(5/6), over 8 with c kept: sqrt(5/8)
    std per prompt: a sqrt(3/4), b 1
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_verl.advantage import scalerl_advantages

REWARDS = np.array([1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0, 1.0])
IDS = np.array(list("aaaabbcc"), dtype=object)
TRAINS = np.ones(8, dtype=bool)
CENTRED = np.array([0.5, -1.5, 0.5, 0.5, -1.0, 1.0, 0.0, 0.0])


@pytest.mark.parametrize(("zero_variance", "num_kept"), [("drop", 6), ("keep", 8)])
def test_hand_computed_batch(zero_variance, num_kept):
    std = np.sqrt(5 / num_kept)
    for adv_norm, divisor in [("batch", std), ("none", 1.0), ("prompt", np.array([np.sqrt(0.75)] * 4 + [1.0] * 4))]:
        result = scalerl_advantages(REWARDS, IDS, TRAINS, adv_norm=adv_norm, zero_variance=zero_variance)
        np.testing.assert_allclose(result.advantages_B, CENTRED / divisor, rtol=1e-14)
        assert result.advantages_B.dtype == np.float64
        assert result.kept_B.tolist() == [True] * num_kept + [False] * (8 - num_kept)
        assert result.std == pytest.approx(std)
        assert result.groups.num_rows_kept == 6


def test_default_is_batch_normalisation_with_dropping():
    default = scalerl_advantages(REWARDS, IDS, TRAINS)
    explicit = scalerl_advantages(REWARDS, IDS, TRAINS, adv_norm="batch", zero_variance="drop")
    assert default.advantages_B.tolist() == explicit.advantages_B.tolist()
    assert np.std(default.advantages_B[default.kept_B]) == pytest.approx(1.0)


@pytest.mark.fault("group of one, std of 0, float noise of equal rewards: huge or NaN advantages")
@pytest.mark.parametrize("adv_norm", ["batch", "prompt", "none"])
@pytest.mark.parametrize("zero_variance", ["drop", "keep"])
def test_float_noise_group_of_one_and_zero_std_give_exact_zeros(adv_norm, zero_variance):
    rewards = [0.1] * 3 + [1.0]
    ids = ["noise"] * 3 + ["single"]
    result = scalerl_advantages(rewards, ids, np.ones(4, bool), adv_norm=adv_norm, zero_variance=zero_variance)
    assert result.advantages_B.tolist() == [0.0] * 4
    assert result.std == 0.0
    assert result.kept_B.tolist() == [zero_variance == "keep"] * 3 + [False]
    assert result.groups.num_single == 1 and result.groups.num_all_right == 1


@pytest.mark.parametrize("adv_norm", ["batch", "prompt", "none"])
def test_noise_group_beside_mixed_groups_stays_zero(adv_norm):
    result = scalerl_advantages([0.1] * 3 + [1.0, -1.0], list("nnnmm"), np.ones(5, bool), adv_norm=adv_norm)
    assert result.advantages_B.tolist() == [0.0, 0.0, 0.0, 1.0, -1.0]


@pytest.mark.fault("batch not divisible by the group, partial groups: tail advantages far too large")
@pytest.mark.parametrize("adv_norm", ["batch", "prompt", "none"])
@pytest.mark.parametrize("sizes", [(4, 4, 3), (4, 4, 2), (4, 4, 1), (1, 7, 2, 5)])
def test_incomplete_tail_groups_get_advantages_of_the_usual_size(adv_norm, sizes):
    ids = np.repeat(np.arange(len(sizes)), sizes)
    rewards = np.where(np.arange(ids.size) % 2 == 0, 1.0, -1.0)
    result = scalerl_advantages(rewards, ids, np.ones(ids.size, bool), adv_norm=adv_norm)
    assert np.abs(result.advantages_B).max() < 3.0
    for p, size in enumerate(sizes):
        rows = ids == p
        centred = rewards[rows] - rewards[rows].mean()
        if size == 1:
            assert not result.advantages_B[rows].any()
        else:
            scale = {"none": 1.0, "prompt": centred.std(), "batch": result.std}[adv_norm]
            np.testing.assert_allclose(result.advantages_B[rows], centred / scale, rtol=1e-13)


@pytest.mark.fault("padding rows enter mean and std")
@pytest.mark.parametrize("zero_variance", ["drop", "keep"])
def test_padding_rows_enter_neither_mean_nor_std(zero_variance):
    expected = scalerl_advantages(REWARDS, IDS, TRAINS, zero_variance=zero_variance)
    for junk in (0.0, 1e9, np.nan, np.inf):
        padded = scalerl_advantages(
            np.concatenate([[junk], REWARDS, [junk, junk]]),
            np.array(["a", *IDS, "b", "padding"], dtype=object),
            np.concatenate([[False], TRAINS, [False, False]]),
            zero_variance=zero_variance,
        )
        assert padded.advantages_B.tolist() == [0.0, *expected.advantages_B.tolist(), 0.0, 0.0]
        assert padded.std == expected.std
        assert padded.kept_B.tolist() == [False, *expected.kept_B.tolist(), False, False]


@pytest.mark.parametrize("adv_norm", ["batch", "prompt"])
def test_smallest_and_largest_spread_that_counts_gives_finite_advantages(adv_norm):
    for rewards in ([0.0, 1.1e-6], [0.0, 1e9], [1e9, 1e9 + 1001.0]):
        with np.errstate(all="raise"):
            result = scalerl_advantages(rewards, ["a", "a"], np.ones(2, bool), adv_norm=adv_norm)
        np.testing.assert_allclose(result.advantages_B, [-1.0, 1.0], rtol=1e-9)


@pytest.mark.fault("every group filtered: the run aborts or divides by 0")
def test_every_group_filtered_neither_aborts_nor_divides_by_zero():
    with np.errstate(all="raise"):
        for rewards, trains in [([1.0, 1.0, -1.0, -1.0], np.ones(4, bool)), ([1.0, -1.0] * 2, np.zeros(4, bool))]:
            result = scalerl_advantages(rewards, list("aabb"), trains)
            assert not result.advantages_B.any() and not result.kept_B.any() and result.std == 0.0
    assert scalerl_advantages([], [], np.zeros(0, bool)).advantages_B.shape == (0,)


batches = st.lists(st.tuples(st.integers(0, 4), st.integers(-8, 8), st.booleans()), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(rows=batches, zero_variance=st.sampled_from(["drop", "keep"]))
def test_doubling_all_rewards_leaves_batch_normalised_advantages_unchanged(rows, zero_variance):
    ids, rewards, trains = (np.array(column) for column in zip(*rows, strict=True))
    once = scalerl_advantages(rewards, ids, trains, zero_variance=zero_variance)
    twice = scalerl_advantages(2.0 * rewards, ids, trains, zero_variance=zero_variance)
    assert once.advantages_B.tolist() == twice.advantages_B.tolist()
    assert twice.std == 2.0 * once.std


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.floats(-2.0, 2.0, width=32), st.booleans()), min_size=1, max_size=30),
    adv_norm=st.sampled_from(["batch", "prompt", "none"]),
    zero_variance=st.sampled_from(["drop", "keep"]),
    shuffle=st.randoms(use_true_random=False),
)
def test_independent_of_the_order_of_rows_to_the_last_bit(rows, adv_norm, zero_variance, shuffle):
    ids, rewards, trains = (np.array(column) for column in zip(*rows, strict=True))
    options = {"adv_norm": adv_norm, "zero_variance": zero_variance}
    expected = scalerl_advantages(rewards, ids, trains, **options)
    order = list(range(len(rows)))
    shuffle.shuffle(order)
    permuted = scalerl_advantages(rewards[order], ids[order], trains[order], **options)
    assert permuted.advantages_B.tolist() == expected.advantages_B[order].tolist()
    assert permuted.std == expected.std
    assert not expected.advantages_B[~expected.kept_B].any()
    for p in set(ids.tolist()):
        assert expected.advantages_B[ids == p].sum() == pytest.approx(0.0, abs=1e-6)
    if adv_norm == "batch" and expected.std > 0:
        assert np.std(expected.advantages_B[expected.kept_B]) == pytest.approx(1.0)


@pytest.mark.parametrize("adv_norm", ["batch", "prompt", "none"])
def test_sums_over_many_rows_do_not_round_by_their_order(adv_norm):
    rng = np.random.default_rng(0)
    rewards, ids, trains = rng.normal(size=320), np.repeat(np.arange(4), 80), np.ones(320, dtype=bool)
    order = rng.permutation(320)
    naive = [(rewards[ids == p].mean(), rewards[order][ids[order] == p].mean()) for p in range(4)]
    assert any(before != after for before, after in naive), "the batch must be able to show it"
    expected = scalerl_advantages(rewards, ids, trains, adv_norm=adv_norm)
    permuted = scalerl_advantages(rewards[order], ids[order], trains, adv_norm=adv_norm)
    assert permuted.advantages_B.tolist() == expected.advantages_B[order].tolist()
    assert permuted.std == expected.std


@pytest.mark.parametrize("options", [{"adv_norm": "group"}, {"zero_variance": "filter"}])
def test_refuses_unknown_options_and_lists_the_allowed(options):
    with pytest.raises(ValueError, match="allowed are"):
        scalerl_advantages(REWARDS, IDS, TRAINS, **options)
