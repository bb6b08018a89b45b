# SPDX-License-Identifier: Apache-2.0
"""CISPO per token: value, gradient, and what non-finite log-probabilities may do to them.

The hand-computed batch (2 x 3, eps_max 2, logp_train = ln p, logp_rollout = ln q):

    row 0: A = +1.5   p = 1/2, 1/4, 1/8    q = 1/4, 1/2, 1/64   rho = 2, 1/2, 8   min(rho, 2) = 2, 1/2, 2
    row 1: A = -0.5   p = 1/2, 1/2, pad    q = 1/2, 1/8, pad    rho = 1, 4        min(rho, 2) = 1, 2

    loss = -min(rho, 2) * A * ln p, in units of ln 2 (ln p = -1, -2, -3 and -1, -1):
    row 0: 2*1.5*1 = 3,   0.5*1.5*2 = 1.5,   2*1.5*3 = 9
    row 1: -1*0.5*1 = -0.5,   -2*0.5*1 = -1,   0
    gradient to logp_train = -min(rho, 2) * A:
    row 0: -3, -0.75, -3;   row 1: 0.5, 1, 0
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_verl.loss import cispo_metrics, cispo_token_loss
from scalerl_verl.loss.ratios import MAX_ABS_LOGP

INF, NAN = math.inf, math.nan
LN2 = math.log(2.0)
METRICS = {
    "scalerl/loss/ratio_mean": "mean",
    "scalerl/loss/ratio_max": "max",
    "scalerl/loss/ratio_min": "min",
    "scalerl/loss/capped_frac_pos": "mean",
    "scalerl/loss/capped_frac_neg": "mean",
    "scalerl/loss/ess_frac": "mean",
    "scalerl/loss/out_of_range_frac": "mean",
    "scalerl/loss/out_of_range_tokens_sum": "sum",
    "scalerl/loss/nonfinite_tokens_sum": "sum",
    "scalerl/mismatch/log_ratio_abs_mean": "mean",
    "scalerl/mismatch/log_ratio_abs_max": "max",
    "scalerl/mismatch/sequence_log_ratio_abs_max": "max",
    "scalerl/mismatch/k3_kl": "mean",
    "scalerl/mismatch/ess_frac": "mean",
    "scalerl/mismatch/above_cap_frac": "mean",
}


def hand_batch(pad: float = NAN) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    logp_train_BT = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, pad]], dtype=torch.float64) * LN2
    logp_rollout_BT = torch.tensor([[-2.0, -1.0, -6.0], [-1.0, -3.0, pad]], dtype=torch.float64) * LN2
    advantages_BT = torch.tensor([[1.5, 1.5, 1.5], [-0.5, -0.5, pad]], dtype=torch.float64)
    mask_BT = torch.tensor([[True, True, True], [True, True, False]])
    return logp_train_BT, logp_rollout_BT, advantages_BT, mask_BT


def loss_and_grad(
    logp_train_BT: torch.Tensor,
    logp_rollout_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    eps_max: float = 5.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    logp_train_BT = logp_train_BT.clone().requires_grad_()
    loss_BT = cispo_token_loss(logp_train_BT, logp_rollout_BT, advantages_BT, mask_BT, eps_max)
    loss_BT.sum().backward()
    assert logp_train_BT.grad is not None
    return loss_BT.detach(), logp_train_BT.grad


def one_token(logp_train: float, logp_rollout: float, advantage: float = 1.5) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of a token beside a healthy one (ratio 1)."""
    return loss_and_grad(
        torch.tensor([[logp_train, -1.0]]),
        torch.tensor([[logp_rollout, -1.0]]),
        torch.full((1, 2), advantage),
        torch.ones(1, 2, dtype=torch.bool),
    )


def test_hand_computed_batch():
    loss_BT, grad_BT = loss_and_grad(*hand_batch(), eps_max=2.0)
    torch.testing.assert_close(loss_BT / LN2, torch.tensor([[3.0, 1.5, 9.0], [-0.5, -1.0, 0.0]]).double())
    torch.testing.assert_close(grad_BT, torch.tensor([[-3.0, -0.75, -3.0], [0.5, 1.0, 0.0]]).double())


def test_gradient_is_the_finite_difference_with_the_ratio_held_fixed():
    torch.manual_seed(0)
    logp_train_BT = -3 * torch.rand(4, 5, dtype=torch.float64)
    logp_rollout_BT = -3 * torch.rand(4, 5, dtype=torch.float64)
    advantages_BT = torch.randn(4, 5, dtype=torch.float64)
    mask_BT = torch.rand(4, 5) > 0.3
    _, grad_BT = loss_and_grad(logp_train_BT, logp_rollout_BT, advantages_BT, mask_BT, 2.0)
    ratio_BT = torch.clamp(torch.exp(logp_train_BT - logp_rollout_BT), max=2.0)
    assert (ratio_BT == 2.0).any() and (ratio_BT < 1.0).any()

    def held_fixed(logp_BT: torch.Tensor) -> float:
        return float(-(ratio_BT * advantages_BT * logp_BT)[mask_BT].sum())

    step = 1e-4
    for b in range(4):
        for t in range(5):
            shift_BT = torch.zeros(4, 5, dtype=torch.float64)
            shift_BT[b, t] = step
            numeric = (held_fixed(logp_train_BT + shift_BT) - held_fixed(logp_train_BT - shift_BT)) / (2 * step)
            assert float(grad_BT[b, t]) == pytest.approx(numeric, abs=1e-9)


@pytest.mark.fault("a positive lower clip off-policy lets drift run away")
def test_cap_is_absolute_and_there_is_no_lower_clip_off_policy():
    """A lower clip would hold the weight of a token the policy has left at 1 - eps; ours goes to 0 with the ratio."""
    for ratio, weight in [(1e-6, 1e-6), (0.01, 0.01), (0.7, 0.7), (4.9, 4.9), (5.1, 5.0), (6.0, 5.0), (1e6, 5.0)]:
        logp_train = -1.0 if ratio >= 1 else math.log(ratio) - 1.0
        _, grad_BT = one_token(logp_train, logp_train - math.log(ratio))
        assert float(grad_BT[0, 0]) == pytest.approx(-1.5 * weight, rel=1e-5)


@pytest.mark.fault("log-probs of -inf, overflowing ratios, anything at masked positions: a NaN loss")
@pytest.mark.parametrize("junk", [NAN, INF, -INF, 3.0e38, -3.0e38])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_masked_positions_never_contribute_whatever_they_hold(junk, place):
    clean, dirty = [], []
    for i, tensor in enumerate(hand_batch(pad=0.0)[:3]):
        clean.append(tensor.float())
        dirty.append(tensor.float())
        if i == place:
            dirty[-1][1, 2] = junk
    mask_BT = hand_batch()[3]
    loss_BT, grad_BT = loss_and_grad(*dirty, mask_BT)
    assert float(loss_BT[1, 2]) == 0.0 and float(grad_BT[1, 2]) == 0.0
    expected_loss_BT, expected_grad_BT = loss_and_grad(*clean, mask_BT)
    assert torch.equal(loss_BT, expected_loss_BT) and torch.equal(grad_BT, expected_grad_BT)
    assert cispo_metrics(*dirty, mask_BT, 5.0) == cispo_metrics(*clean, mask_BT, 5.0)


@pytest.mark.fault("log-probs of -inf, overflowing ratios, anything at masked positions: a NaN loss")
@pytest.mark.parametrize(
    ("logp_train", "logp_rollout"),
    [
        (-INF, -1.0),
        (-INF, -INF),
        (NAN, -1.0),
        (INF, -1.0),
        (-1.0, NAN),
        (-1.0, INF),
        (NAN, NAN),
        (-3.4e38, -3.4e38),
        (3.0e38, -1.0),
        (-MAX_ABS_LOGP, -MAX_ABS_LOGP),
    ],
)
def test_nonfinite_logprobs_never_reach_the_loss(logp_train, logp_rollout):
    loss_BT, grad_BT = one_token(logp_train, logp_rollout)
    assert loss_BT.tolist() == [[0.0, 1.5]]
    assert grad_BT.tolist() == [[0.0, -1.5]]
    pairs = torch.tensor([[[logp_train, -1.0]], [[logp_rollout, -1.0]]])
    metrics = cispo_metrics(*pairs, torch.ones(1, 2), torch.ones(1, 2), 5.0)
    assert metrics["scalerl/loss/nonfinite_tokens_sum"] == (1.0, "sum")
    assert metrics["scalerl/loss/ratio_max"] == (1.0, "max")
    assert all(math.isfinite(value) for value, _ in metrics.values())


@pytest.mark.fault("log-probs of -inf, overflowing ratios, anything at masked positions: a NaN loss")
@pytest.mark.parametrize("logp_rollout", [-INF, -1e30, -1e4, -100.0])
def test_impossible_token_or_overflowing_ratio_is_capped(logp_rollout):
    loss_BT, grad_BT = one_token(-2.0, logp_rollout)
    assert float(loss_BT[0, 0]) == pytest.approx(5.0 * 1.5 * 2.0)
    assert float(grad_BT[0, 0]) == pytest.approx(-5.0 * 1.5)
    pairs = torch.tensor([[[-2.0]], [[logp_rollout]]])
    metrics = cispo_metrics(*pairs, torch.ones(1, 1), torch.ones(1, 1), 5.0)
    assert all(math.isfinite(value) for value, _ in metrics.values())
    assert metrics["scalerl/loss/capped_frac_pos"][0] == 1.0
    assert metrics["scalerl/loss/nonfinite_tokens_sum"][0] == 0.0


def test_gradient_stays_finite_through_the_softmax_that_made_minus_infinity():
    logits_BTV = torch.tensor([[[0.3, -INF, 1.0], [0.1, 0.2, 0.3]]], requires_grad=True)
    logp_BT = torch.log_softmax(logits_BTV, dim=-1)[:, :, 1]
    loss_BT = cispo_token_loss(logp_BT, torch.full((1, 2), -1.0), torch.ones(1, 2), torch.ones(1, 2))
    loss_BT.sum().backward()
    assert torch.isfinite(loss_BT).all() and torch.isfinite(logits_BTV.grad).all()
    assert float(logits_BTV.grad[0, 1].abs().sum()) > 0


def test_nonfinite_advantage_at_a_usable_token_is_not_hidden():
    args = torch.full((1, 1), -1.0), torch.full((1, 1), -1.0), torch.full((1, 1), NAN), torch.ones(1, 1)
    assert torch.isnan(cispo_token_loss(*args)).all()


@pytest.mark.fault("log-probs of -inf, overflowing ratios, anything at masked positions: a NaN loss")
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_loss_and_gradient_are_finite_for_any_logprobs(data):
    anything = st.floats(width=32)
    rows = st.lists(anything, min_size=6, max_size=6)
    logp_train_BT = torch.tensor(data.draw(rows)).view(2, 3)
    logp_rollout_BT = torch.tensor(data.draw(rows)).view(2, 3)
    mask_BT = torch.tensor(data.draw(st.lists(st.booleans(), min_size=6, max_size=6))).view(2, 3)
    loss_BT, grad_BT = loss_and_grad(logp_train_BT, logp_rollout_BT, torch.full((2, 3), 2.0), mask_BT)
    assert torch.isfinite(loss_BT).all() and torch.isfinite(loss_BT.sum()) and torch.isfinite(grad_BT).all()
    assert not loss_BT[~mask_BT].any() and not grad_BT[~mask_BT].any()
    assert float(grad_BT.abs().max()) <= 5.0 * 2.0 * (1 + 1e-6)
    metrics = cispo_metrics(logp_train_BT, logp_rollout_BT, torch.ones(2, 3), mask_BT, 5.0)
    assert all(math.isfinite(value) for value, _ in metrics.values())


def test_bfloat16_inputs_make_a_float32_ratio():
    logp_train_BT, logp_rollout_BT, advantages_BT, mask_BT = hand_batch(pad=0.0)
    low = [tensor.bfloat16() for tensor in (logp_train_BT, logp_rollout_BT, advantages_BT)]
    loss_BT = cispo_token_loss(*low, mask_BT, 100.0)
    assert loss_BT.dtype == torch.float32
    assert torch.equal(loss_BT, cispo_token_loss(*[tensor.float() for tensor in low], mask_BT, 100.0))
    assert cispo_token_loss(logp_train_BT, logp_rollout_BT, advantages_BT, mask_BT).dtype == torch.float64
    assert cispo_token_loss(logp_train_BT.float(), *low[1:], mask_BT).dtype == torch.float32


def test_only_logp_train_receives_a_gradient():
    logp_train_BT, logp_rollout_BT, advantages_BT, mask_BT = hand_batch()
    leaves = [tensor.clone().requires_grad_() for tensor in (logp_train_BT, logp_rollout_BT, advantages_BT)]
    cispo_token_loss(*leaves, mask_BT).sum().backward()
    assert leaves[0].grad is not None and leaves[1].grad is None and leaves[2].grad is None


@pytest.mark.parametrize("eps_max", [0, 0.0, -5.0, NAN, INF, None, "5", True])
def test_refuses_a_cap_that_is_no_finite_positive_number(eps_max):
    for function in (cispo_token_loss, cispo_metrics):
        with pytest.raises(ValueError, match="eps_max"):
            function(*hand_batch(), eps_max)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_refuses_shapes_that_would_broadcast(place):
    args = list(hand_batch())
    args[place] = args[place][:, :1]
    for function in (cispo_token_loss, cispo_metrics):
        with pytest.raises(ValueError, match="same"):
            function(*args, 5.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_refuses_half_precision_ratios(place, dtype):
    args = list(hand_batch(pad=0.0))
    args[place] = args[place].to(dtype)
    for function in (cispo_token_loss, cispo_metrics):
        with pytest.raises(ValueError, match="dtype"):
            function(*args, 5.0)


def test_a_cap_beyond_the_range_of_float32_does_not_overflow():
    args = torch.full((1, 1), -1.0), torch.full((1, 1), -INF), torch.ones(1, 1), torch.ones(1, 1)
    assert torch.isfinite(cispo_token_loss(*args, 1e300)).all()


def test_metrics_of_the_hand_computed_batch():
    """rho = 2, 1/2, 8 (A > 0) and 1, 4 (A < 0); eps_max 3; truncated 2, 1/2, 3, 1, 3: sum 9.5, squares 23.25.

    log-ratios in ln 2: 1, -1, 3 (sum 3) and 0, 2; k3 = mean(rho) - 1 - mean(log rho) = 3.1 - 1 - ln 2.
    """
    metrics = cispo_metrics(*hand_batch(), 3.0)
    assert {name: aggregation for name, (_, aggregation) in metrics.items()} == METRICS
    assert {name: value for name, (value, _) in metrics.items()} == pytest.approx(
        {
            "scalerl/loss/ratio_mean": 15.5 / 5,
            "scalerl/loss/ratio_max": 8.0,
            "scalerl/loss/ratio_min": 0.5,
            "scalerl/loss/capped_frac_pos": 1 / 3,
            "scalerl/loss/capped_frac_neg": 0.5,
            "scalerl/loss/ess_frac": 9.5**2 / (5 * 23.25),
            "scalerl/loss/out_of_range_frac": 0.0,
            "scalerl/loss/out_of_range_tokens_sum": 0.0,
            "scalerl/loss/nonfinite_tokens_sum": 0.0,
            "scalerl/mismatch/log_ratio_abs_mean": 7 * LN2 / 5,
            "scalerl/mismatch/log_ratio_abs_max": 3 * LN2,
            "scalerl/mismatch/sequence_log_ratio_abs_max": 3 * LN2,
            "scalerl/mismatch/k3_kl": 3.1 - 1 - LN2,
            "scalerl/mismatch/ess_frac": 9.5**2 / (5 * 23.25),
            "scalerl/mismatch/above_cap_frac": 2 / 5,
        }
    )


@pytest.mark.fault("a response mask of False only: metrics crash")
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_all_false_mask_gives_neutral_metrics_and_zero_loss(shape):
    junk_BT = torch.full(shape, NAN)
    mask_BT = torch.zeros(shape, dtype=torch.bool)
    metrics = cispo_metrics(junk_BT, junk_BT, junk_BT, mask_BT, 5.0)
    assert {name: aggregation for name, (_, aggregation) in metrics.items()} == METRICS
    for name, (value, _) in metrics.items():
        assert value == (1.0 if name.startswith("scalerl/loss/ratio") or name.endswith("ess_frac") else 0.0)
    loss_BT, grad_BT = loss_and_grad(junk_BT, junk_BT, junk_BT, mask_BT)
    assert not loss_BT.any() and not grad_BT.any()


def test_equals_cispo_of_verl_when_neither_clips():
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig

    from scalerl_verl.loss import aggregate_loss

    torch.manual_seed(1)
    logp_train_BT = -3 * torch.rand(6, 7, dtype=torch.float64)
    logp_rollout_BT = -3 * torch.rand(6, 7, dtype=torch.float64)
    advantages_BT = torch.randn(6, 7, dtype=torch.float64)
    mask_BT = torch.rand(6, 7) > 0.3
    config = FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=1e9, clip_ratio_high=1e9
    )
    theirs_BT, ours_BT = logp_train_BT.clone().requires_grad_(), logp_train_BT.clone().requires_grad_()
    theirs, _ = get_policy_loss_fn("cispo")(
        old_log_prob=logp_rollout_BT,
        log_prob=theirs_BT,
        advantages=advantages_BT,
        response_mask=mask_BT,
        loss_agg_mode="token-mean",
        config=config,
    )
    ours = aggregate_loss(
        cispo_token_loss(ours_BT, logp_rollout_BT, advantages_BT, mask_BT, 1e9), mask_BT, "token-mean"
    )
    theirs.backward()
    ours.backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours_BT.grad, theirs_BT.grad, rtol=1e-12, atol=0)
