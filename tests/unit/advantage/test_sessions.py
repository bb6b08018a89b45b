# SPDX-License-Identifier: Apache-2.0
"""Sessions of several outputs: each counts once, and its tokens train wherever they stand.

The hand-computed batch, 10 rows; the reward of a session is that of its last output:

    session   a_0        a_1  a_2  b_0        b_1  c_0        c_1
    outputs   2 + 1      3    2    1 + 4      1    3 + 1      4      tokens
    reward    1          -1   -1   1          1    1          -1     b is dropped

    mean      a: -1/3 (0 if rows counted)       c: 0 (1/3 if rows counted)
    centred   a: 4/3, -2/3, -2/3                c: 1, -1
    std       sqrt((16/9 + 4/9 + 4/9 + 1 + 1) / 5) = sqrt(14/15)

    T_a = 8, T_c = 8, P_kept = 2, N_kept = 5 sessions, T_all = 22
    prompt-mean                10 / (2 * 8)
    seq-mean-token-sum, -norm  10 / 5
    seq-mean-token-mean        10 / 5 times a_0: 2/3, 1/3   c_0: 3/4, 1/4   a_1, a_2, c_1: 1
    token-mean                 22 / 16
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_verl.advantage import Sessions, index_sessions, row_weights, scalerl_advantages, session_advantages
from scalerl_verl.loss import AGG_MODES, aggregate_loss, cispo_token_loss

KEYS = ["a_0_0", "a_0_1", "a_1_0", "a_2_0", "b_0_0", "b_0_1", "b_1_0", "c_0_0", "c_0_1", "c_1_0"]
IDS = [key[0] for key in KEYS]
TOKENS = np.array([2, 1, 3, 2, 1, 4, 1, 3, 1, 4])
REWARDS = np.array([1.0, 1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -1.0])
CENTRED = np.array([4 / 3, 4 / 3, -2 / 3, -2 / 3, 0.0, 0.0, 0.0, 1.0, 1.0, -1.0])
KEPT = CENTRED != 0
SHARES = np.array([2 / 3, 1 / 3, 1.0, 1.0, 0.0, 0.0, 0.0, 3 / 4, 1 / 4, 1.0])
HAND = {
    "prompt-mean": 10 / 16,
    "token-mean": 22 / 16,
    "token-sum": 1.0,
    "seq-mean-token-sum": 2.0,
    "seq-mean-token-mean": 2.0 * SHARES,
    "seq-mean-token-sum-norm": 2.0,
}


def shuffled(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(len(KEYS))


@pytest.mark.parametrize("order", [np.arange(10), shuffled(0), shuffled(1)], ids=["in order", "shuffled", "again"])
def test_hand_computed_advantages_count_each_session_once(order: np.ndarray) -> None:
    sessions = index_sessions([KEYS[i] for i in order])
    ids_B, rewards_B = np.array(IDS, dtype=object)[order], REWARDS[order]
    for adv_norm, divisor in [("none", 1.0), ("batch", math.sqrt(14 / 15))]:
        result = session_advantages(rewards_B, ids_B, TOKENS[order] > 0, sessions, adv_norm=adv_norm)
        np.testing.assert_allclose(result.advantages_B, CENTRED[order] / divisor, rtol=1e-14)
        assert result.kept_B.tolist() == KEPT[order].tolist()
        assert result.std == pytest.approx(math.sqrt(14 / 15))
        groups = result.groups
        assert (groups.num_groups, groups.num_mixed, groups.num_all_right, groups.num_rows) == (3, 2, 1, 7)


def test_rows_counted_as_responses_would_give_other_advantages() -> None:
    """Guards the test above."""
    rows = scalerl_advantages(REWARDS, IDS, TOKENS > 0, adv_norm="none").advantages_B
    assert np.abs(rows - CENTRED)[[0, 2, 7, 9]].min() > 0.3


@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("seed", [None, 0])
def test_hand_computed_weights(mode: str, seed: int | None) -> None:
    order = np.arange(10) if seed is None else shuffled(seed)
    weights_B = row_weights(
        mode,
        TOKENS[order],
        [IDS[i] for i in order],
        KEPT[order],
        num_rows=10,
        trains_B=TOKENS > 0,
        sessions=index_sessions([KEYS[i] for i in order]),
    )
    np.testing.assert_allclose(weights_B, (np.where(KEPT, 1.0, 0.0) * HAND[mode])[order], rtol=1e-14)


def test_reward_is_that_of_the_last_output_even_if_that_does_not_train() -> None:
    """a_0 ends with a masked output of reward 1 (index 10, not 9); a colocated reward model scored the others, too."""
    keys, rewards = ["a_0_9", "a_0_10", "a_1_0"], [-7.0, 1.0, -1.0]
    sessions = index_sessions(keys)
    assert sessions.final_row_S.tolist() == [1, 2] and sessions.index_B.tolist() == [0, 0, 1]
    result = session_advantages(rewards, list("aaa"), [True, False, True], sessions, adv_norm="none")
    assert result.advantages_B.tolist() == [1.0, 0.0, -1.0]
    assert result.kept_B.tolist() == [True, False, True]


def test_session_without_a_token_that_trains_takes_no_part() -> None:
    sessions = index_sessions(["a_0_0", "a_1_0", "a_2_0", "a_2_1", "pad0_0_0"])
    rewards = [1.0, -1.0, math.nan, math.nan, 7.0]
    trains = [True, True, False, False, False]
    result = session_advantages(rewards, ["a", "a", "a", "a", "pad0"], trains, sessions, adv_norm="none")
    assert result.advantages_B.tolist() == [1.0, -1.0, 0.0, 0.0, 0.0]
    assert result.groups.num_rows == 2


def test_one_row_a_session_is_the_estimator_itself() -> None:
    rng = np.random.default_rng(0)
    rewards, ids, trains = rng.normal(size=12), np.repeat(np.arange(3), 4), rng.random(12) > 0.2
    by_row = scalerl_advantages(rewards, ids, trains)
    for sessions in (Sessions.one_per_row(12), index_sessions([f"{p}_{row}_0" for row, p in enumerate(ids)])):
        by_session = session_advantages(rewards, ids, trains, sessions)
        assert by_session.advantages_B.tolist() == by_row.advantages_B.tolist()
        assert by_session.kept_B.tolist() == by_row.kept_B.tolist() and by_session.std == by_row.std


@pytest.mark.parametrize("key", ["a", "a_0", "a_0_x", "a_0_-1"])
def test_keys_of_another_form_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match="form <uid>_<session>_<output>"):
        index_sessions(["a_0_0", key])


def test_key_that_stands_there_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        index_sessions(["a_0_0", "a_0_0"])


class Responses:
    """Random sessions, each a list of tokens that can be cut into rows at will."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        sizes = rng.integers(1, 5, size=rng.integers(1, 5))
        self.prompts = [f"x{p}" for p, size in enumerate(sizes) for _ in range(size)]
        self.rewards = rng.choice([-1.0, 1.0], size=len(self.prompts))
        self.train = [-3 * rng.random(rng.integers(1, 9)) for _ in self.prompts]
        self.rollout = [-3 * rng.random(tokens.size) for tokens in self.train]

    def run(self, mode: str, cuts: list[list[int]], shuffle: Any, num_padding: int) -> tuple[float, np.ndarray]:
        """Loss, and gradient per token in the order of sessions, with session s cut into rows at ``cuts[s]``."""
        rows = [
            (s, output, span)
            for s, tokens in enumerate(self.train)
            for output, span in enumerate(np.split(np.arange(tokens.size), cuts[s]))
        ]
        shuffle.shuffle(rows)
        keys = [f"{self.prompts[s]}_{s}_{output}" for s, output, _ in rows]
        keys += [f"pad_{i}_0" for i in range(num_padding)]
        ids = [key.split("_")[0] for key in keys]
        width, num_rows = max(tokens.size for tokens in self.train), len(keys)
        logp_BT = torch.full((num_rows, width), math.nan, dtype=torch.float64)
        rollout_BT, mask_BT = logp_BT.clone(), torch.zeros(num_rows, width, dtype=torch.bool)
        for row, (s, _, span) in enumerate(rows):
            logp_BT[row, : span.size] = torch.from_numpy(self.train[s][span])
            rollout_BT[row, : span.size] = torch.from_numpy(self.rollout[s][span])
            mask_BT[row, : span.size] = True
        tokens_B, sessions = mask_BT.sum(-1).numpy(), index_sessions(keys)
        rewards_B = [self.rewards[s] for s, _, _ in rows] + [0.0] * num_padding
        result = session_advantages(rewards_B, ids, tokens_B > 0, sessions)
        weights_B = row_weights(
            mode, tokens_B, ids, result.kept_B, num_rows=num_rows, trains_B=tokens_B > 0, sessions=sessions
        )
        advantages_BT = torch.from_numpy(result.advantages_B * weights_B)[:, None].expand(num_rows, width)
        logp_BT.requires_grad_()
        loss_BT = cispo_token_loss(logp_BT, rollout_BT, advantages_BT, mask_BT, 2.0)
        counts = {"batch_num_tokens": int(tokens_B.sum()), "global_batch_size": num_rows, "loss_scale_factor": 13}
        loss = aggregate_loss(loss_BT, mask_BT, mode, **counts)
        loss.backward()
        grads = [np.zeros(tokens.size) for tokens in self.train]
        for row, (s, _, span) in enumerate(rows):
            grads[s][span] = logp_BT.grad[row, : span.size].numpy()
        return float(loss.detach()), np.concatenate(grads)


@pytest.mark.parametrize("mode", AGG_MODES)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), shuffle=st.randoms(use_true_random=False), num_padding=st.integers(0, 3))
def test_cutting_sessions_into_rows_leaves_loss_and_gradient_alone(
    mode: str, data: Any, shuffle: Any, num_padding: int
) -> None:
    responses = Responses(data.draw(st.integers(0, 10_000)))
    whole, whole_grad = responses.run(mode, [[] for _ in responses.train], shuffle, 0)
    # Two cuts at one place leave an output without a token that trains.
    cuts = [
        sorted(data.draw(st.lists(st.integers(0, tokens.size), max_size=3), label="cuts")) for tokens in responses.train
    ]
    loss, grad = responses.run(mode, cuts, shuffle, num_padding)
    assert loss == pytest.approx(whole, rel=1e-12, abs=1e-13)
    np.testing.assert_allclose(grad, whole_grad, rtol=1e-12, atol=1e-14)


def test_batches_of_the_test_above_have_a_gradient() -> None:
    import random

    losses = [Responses(seed) for seed in range(8)]
    grads = [batch.run("prompt-mean", [[] for _ in batch.train], random.Random(0), 0)[1] for batch in losses]
    assert sum(bool(grad.any()) for grad in grads) >= 4
