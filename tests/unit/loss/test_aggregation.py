# SPDX-License-Identifier: Apache-2.0
"""Aggregation: verl's numbers in verl's modes, and one gradient for every split of a batch.

The hand-computed batch (2 x 3): losses 1, 2, 6 and 4, 2, (masked).

    token-mean               (1 + 2 + 6 + 4 + 2) / 5 = 3
    token-sum                15
    seq-mean-token-sum       (9 + 6) / 2 = 7.5
    seq-mean-token-mean      (3 + 3) / 2 = 3
    seq-mean-token-sum-norm  7.5 / 3 = 2.5
    prompt-mean              15 / 2 = 7.5 (the weights of the prompts are in the losses)
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_verl.advantage import row_weights, scalerl_advantages
from scalerl_verl.loss import AGG_MODES, aggregate_loss, cispo_token_loss

VERL_MODES = AGG_MODES[:5]
HAND = {
    "token-mean": 3.0,
    "token-sum": 15.0,
    "seq-mean-token-sum": 7.5,
    "seq-mean-token-mean": 3.0,
    "seq-mean-token-sum-norm": 2.5,
    "prompt-mean": 7.5,
}


def hand_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([[1.0, 2.0, 6.0], [4.0, 2.0, 99.0]]), torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)


def rows_of(mode: str) -> dict[str, int]:
    """The batch's number of rows, which the prompt average has to be told."""
    return {"global_batch_size": 2} if mode == "prompt-mean" else {}


@pytest.mark.parametrize("mode", AGG_MODES)
def test_hand_computed_batch(mode):
    assert float(aggregate_loss(*hand_batch(), mode, **rows_of(mode))) == pytest.approx(HAND[mode])


@pytest.mark.parametrize("mode", VERL_MODES)
@pytest.mark.parametrize("counts", ["local", "global", "tensor"])
@pytest.mark.parametrize("loss_scale_factor", [None, 11])
def test_equals_agg_loss_of_verl(mode, counts, loss_scale_factor):
    from verl.trainer.ppo.core_algos import agg_loss

    torch.manual_seed(0)
    loss_BT, mask_BT = torch.randn(5, 7, dtype=torch.float64), torch.rand(5, 7) > 0.4
    mask_BT[3] = False
    keywords = {"loss_scale_factor": loss_scale_factor}
    if counts != "local":
        keywords |= {"dp_size": 4, "batch_num_tokens": 61, "global_batch_size": 24}
    if counts == "tensor":
        keywords |= {"batch_num_tokens": torch.tensor(61), "global_batch_size": torch.tensor(24)}
    expected = agg_loss(loss_mat=loss_BT, loss_mask=mask_BT, loss_agg_mode=mode, **keywords)
    # verl adds 1e-8 to the token counts of seq-mean-token-mean.
    torch.testing.assert_close(aggregate_loss(loss_BT, mask_BT, mode, **keywords), expected, rtol=2e-8, atol=1e-12)


@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_nan_at_masked_positions_leaks_neither_into_loss_nor_gradient(mode, junk):
    loss_BT, mask_BT = hand_batch()
    loss_BT[1, 2] = junk
    loss_BT.requires_grad_()
    loss = aggregate_loss(loss_BT, mask_BT, mode, **rows_of(mode))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(HAND[mode])
    assert float(loss_BT.grad[1, 2]) == 0.0
    assert torch.isfinite(loss_BT.grad).all()


@pytest.mark.fault("a response mask of False only: metrics crash")
@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("counts", [{}, {"batch_num_tokens": 0, "global_batch_size": 0, "dp_size": 2}])
def test_all_false_mask_gives_zero_not_nan(mode, counts):
    loss_BT = torch.full((2, 3), math.nan, requires_grad=True)
    loss = aggregate_loss(loss_BT, torch.zeros(2, 3, dtype=torch.bool), mode, **rows_of(mode) | counts)
    loss.backward()
    assert float(loss.detach()) == 0.0 and not loss_BT.grad.any()


def test_integer_and_float_masks_select_like_boolean_ones():
    loss_BT, mask_BT = hand_batch()
    for dtype in (torch.int64, torch.float32):
        assert float(aggregate_loss(loss_BT, mask_BT.to(dtype), "token-mean")) == HAND["token-mean"]


def test_refuses_an_unknown_mode_and_lists_the_allowed():
    with pytest.raises(ValueError, match="prompt_mean") as error:
        aggregate_loss(*hand_batch(), "prompt_mean")
    assert all(mode in str(error.value) for mode in AGG_MODES)


@pytest.mark.parametrize("mode", [mode for mode in AGG_MODES if mode not in ("token-sum", "prompt-mean")])
def test_refuses_local_counts_on_several_ranks(mode):
    with pytest.raises(ValueError, match="dp_size 2"):
        aggregate_loss(*hand_batch(), mode, dp_size=2)


def test_refuses_shapes_that_would_broadcast_and_no_ranks():
    loss_BT, mask_BT = hand_batch()
    with pytest.raises(ValueError, match="same"):
        aggregate_loss(loss_BT, mask_BT[:1], "token-sum")
    with pytest.raises(ValueError, match="dp_size"):
        aggregate_loss(loss_BT, mask_BT, "token-sum", dp_size=0)


class Batch:
    """A random batch as the driver sees it: groups of uneven sizes, some of equal rewards, ragged responses."""

    def __init__(self, seed: int, mode: str):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(1, 6, size=rng.integers(1, 6))
        self.group_ids_B = np.repeat([f"p{p}" for p in range(sizes.size)], sizes).astype(object)
        num_rows = self.group_ids_B.size
        self.num_tokens_B = rng.integers(0, 9, size=num_rows)
        rewards_B = rng.choice([-1.0, 1.0], size=num_rows)
        self.mode = mode
        trains_B = self.num_tokens_B > 0
        result = scalerl_advantages(rewards_B, self.group_ids_B, trains_B)
        self.advantages_B = result.advantages_B
        self.kept_B, self.trains_B = result.kept_B, trains_B
        self.logp_train = [-3 * rng.random(n) for n in self.num_tokens_B]
        self.logp_rollout = [-3 * rng.random(n) for n in self.num_tokens_B]

    def run(self, order: list[int], width: int, num_padding: int, dp_size: int, num_micro: int) -> tuple[float, list]:
        """Loss and gradient per row: rows dealt to ranks and micro-batches, gradients averaged as FSDP does."""
        num_rows = len(order) + num_padding
        num_rows += -num_rows % dp_size
        weights_B = row_weights(
            self.mode, self.num_tokens_B, self.group_ids_B, self.kept_B, num_rows=num_rows, trains_B=self.trains_B
        )
        logp_BT = torch.full((num_rows, width), math.nan, dtype=torch.float64)
        rollout_BT, advantages_BT = logp_BT.clone(), logp_BT.clone()
        mask_BT = torch.zeros(num_rows, width, dtype=torch.bool)
        for row, i in enumerate(order):
            n = self.num_tokens_B[i]
            logp_BT[row, :n] = torch.from_numpy(self.logp_train[i])
            rollout_BT[row, :n] = torch.from_numpy(self.logp_rollout[i])
            advantages_BT[row, :n] = self.advantages_B[i] * weights_B[i]
            mask_BT[row, :n] = True
        logp_BT.requires_grad_()
        total = 0.0
        for rank in range(dp_size):
            for rows in np.array_split(np.arange(rank, num_rows, dp_size), num_micro):
                rows_B = torch.from_numpy(rows)
                loss = aggregate_loss(
                    cispo_token_loss(logp_BT[rows_B], rollout_BT[rows_B], advantages_BT[rows_B], mask_BT[rows_B], 2.0),
                    mask_BT[rows_B],
                    self.mode,
                    dp_size=dp_size,
                    batch_num_tokens=int(self.num_tokens_B.sum()),
                    global_batch_size=num_rows,
                    loss_scale_factor=13,
                )
                (loss / dp_size).backward()
                total += float(loss.detach()) / dp_size
        assert not logp_BT.grad[~mask_BT].any()
        grads: list = [None] * len(order)
        for row, i in enumerate(order):
            grads[i] = logp_BT.grad[row, : self.num_tokens_B[i]].numpy()
        return total, grads


@pytest.mark.parametrize("mode", AGG_MODES)
def test_loss_and_gradient_are_equal_on_one_and_on_three_ranks(mode):
    batch = Batch(1, mode)
    order = list(range(batch.num_tokens_B.size))
    expected, expected_grads = batch.run(order, width=9, num_padding=0, dp_size=1, num_micro=1)
    assert abs(expected) > 0.01, "the batch must be able to show it"
    loss, grads = batch.run(order[::-1], width=12, num_padding=2, dp_size=3, num_micro=2)
    assert loss == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(np.concatenate(grads), np.concatenate(expected_grads), rtol=1e-12, atol=1e-14)


@pytest.mark.fault("other micro-batches, ranks or token budgets: another loss, or a gradient scaled by the ranks")
@pytest.mark.parametrize("mode", AGG_MODES)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    dp_size=st.integers(1, 4),
    num_micro=st.integers(1, 4),
    width=st.integers(9, 14),
    num_padding=st.integers(0, 5),
    shuffle=st.randoms(use_true_random=False),
)
def test_loss_and_gradient_are_equal_for_every_split_order_and_padding(
    mode, seed, dp_size, num_micro, width, num_padding, shuffle
):
    batch = Batch(seed, mode)
    order = list(range(batch.num_tokens_B.size))
    expected, expected_grads = batch.run(order, width=9, num_padding=0, dp_size=1, num_micro=1)
    shuffle.shuffle(order)
    loss, grads = batch.run(order, width, num_padding, dp_size, num_micro)
    assert loss == pytest.approx(expected, rel=1e-12, abs=1e-12)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mode", ["prompt-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("num_mini", [2, 3, 6])
def test_mini_batches_that_cut_groups_average_to_the_whole_batch(mode, num_mini):
    torch.manual_seed(0)
    loss_BT, mask_BT = torch.randn(12, 5, dtype=torch.float64), torch.rand(12, 5) > 0.4
    ids, kept = list("aaaaabbbcccc"), np.array([True] * 8 + [False] * 4)
    weights_B = row_weights(
        mode, mask_BT.sum(-1).numpy(), ids, kept, num_rows=12, trains_B=mask_BT.any(-1).numpy() | kept
    )
    loss_BT = loss_BT * torch.from_numpy(weights_B)[:, None]
    whole = aggregate_loss(loss_BT, mask_BT, mode, global_batch_size=12)
    parts = [
        aggregate_loss(loss, mask, mode, global_batch_size=12 // num_mini)
        for loss, mask in zip(loss_BT.chunk(num_mini), mask_BT.chunk(num_mini), strict=True)
    ]
    torch.testing.assert_close(torch.stack(parts).mean(), whole, rtol=1e-12, atol=0)


@pytest.mark.fault("every group filtered: the run aborts or divides by 0")
@pytest.mark.parametrize("mode", AGG_MODES)
def test_every_group_filtered_leaves_a_zero_loss(mode):
    batch = Batch(3, mode)
    batch.kept_B = np.zeros_like(batch.kept_B)
    loss, grads = batch.run(list(range(batch.kept_B.size)), width=9, num_padding=2, dp_size=2, num_micro=2)
    assert loss == 0.0 and not any(grad.any() for grad in grads)
