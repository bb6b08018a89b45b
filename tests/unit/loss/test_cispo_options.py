# SPDX-License-Identifier: Apache-2.0
"""The two options of CISPO: masking of tokens by their ratio, and one truncated ratio a sequence.

The hand-computed batch (2 x 3, logp_train = ln p, logp_rollout = ln q), loss in units of ln 2:

    row 0: A = +1.5   p = 1/2, 1/4, 1/8    q = 1/4, 1/2, 1/64   rho = 2, 1/2, 8   product 8   geometric mean 2
    row 1: A = -0.5   p = 1/2, 1/2, pad    q = 1/2, 1/8, pad    rho = 1, 4        product 4   geometric mean 2

    range [3/4, 6], eps_max 3      weights 2, 0, 0 and 1, 3    loss 3, 0, 0 and -1/2, -3/2
    product, eps_max 5             weights 5, 5, 5 and 4, 4    loss 15/2, 15, 45/2 and -2, -2
    geometric mean, eps_max 5      weights 2, 2, 2 and 2, 2    loss 3, 6, 9 and -1, -1
    range and product, eps_max 5   weights 5, 0, 0 and 4, 4    loss 15/2, 0, 0 and -2, -2
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_verl.loss import cispo_metrics, cispo_token_loss

INF, NAN = math.inf, math.nan
LN2 = math.log(2.0)
RANGE = [0.75, 6.0]
HAND = {
    "range": (3.0, RANGE, None, [[2, 0, 0], [1, 3, 0]], [[3, 0, 0], [-0.5, -1.5, 0]]),
    "product": (5.0, None, "product", [[5, 5, 5], [4, 4, 0]], [[7.5, 15, 22.5], [-2, -2, 0]]),
    "geometric mean": (5.0, None, "geometric_mean", [[2, 2, 2], [2, 2, 0]], [[3, 6, 9], [-1, -1, 0]]),
    "range and product": (5.0, RANGE, "product", [[5, 0, 0], [4, 4, 0]], [[7.5, 0, 0], [-2, -2, 0]]),
}
OPTIONS = [
    {"token_mask_range": (0.5, 2.0)},
    {"sequence_truncation": "product"},
    {"sequence_truncation": "geometric_mean"},
    {"token_mask_range": (0.0, 1.5), "sequence_truncation": "product"},
]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def hand_batch(pad: float = NAN) -> Tensors:
    logp_train_BT = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, pad]], dtype=torch.float64) * LN2
    logp_rollout_BT = torch.tensor([[-2.0, -1.0, -6.0], [-1.0, -3.0, pad]], dtype=torch.float64) * LN2
    advantages_BT = torch.tensor([[1.5, 1.5, 1.5], [-0.5, -0.5, pad]], dtype=torch.float64)
    mask_BT = torch.tensor([[True, True, True], [True, True, False]])
    return logp_train_BT, logp_rollout_BT, advantages_BT, mask_BT


def random_batch(rows: int = 6, width: int = 7) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    logp_train_BT, logp_rollout_BT = (-torch.rand(2, rows, width, generator=generator, dtype=torch.float64)).unbind()
    advantages_BT = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return logp_train_BT, logp_rollout_BT, advantages_BT, torch.rand(rows, width, generator=generator) > 0.3


def loss_and_grad(tensors: Tensors, eps_max: float = 5.0, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    logp_train_BT = tensors[0].clone().requires_grad_()
    loss_BT = cispo_token_loss(logp_train_BT, *tensors[1:], eps_max, **options)
    loss_BT.sum().backward()
    assert logp_train_BT.grad is not None
    return loss_BT.detach(), logp_train_BT.grad


@pytest.mark.parametrize("case", HAND)
def test_hand_computed_batch(case):
    eps_max, token_range, truncation, weights, loss = HAND[case]
    options = {"token_mask_range": token_range, "sequence_truncation": truncation}
    loss_BT, grad_BT = loss_and_grad(hand_batch(), eps_max, **options)
    torch.testing.assert_close(loss_BT / LN2, torch.tensor(loss).double())
    torch.testing.assert_close(grad_BT, torch.tensor(weights) * torch.tensor([[-1.5], [0.5]]).double())


def test_off_is_the_loss_and_the_metrics_without_the_options():
    tensors = random_batch()
    plain, off = cispo_token_loss(*tensors), cispo_token_loss(*tensors, 5.0, None, None)
    assert torch.equal(plain, off)
    assert cispo_metrics(*tensors) == cispo_metrics(*tensors, 5.0, None, None)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradient_is_the_finite_difference_with_the_weights_held_fixed(options):
    tensors = random_batch()
    logp_train_BT, logp_rollout_BT, advantages_BT, mask_BT = tensors
    _, grad_BT = loss_and_grad(tensors, 1.1, **options)
    ratio_BT = torch.exp(logp_train_BT - logp_rollout_BT)
    weight_BT = ratio_BT.clone()
    if truncation := options.get("sequence_truncation"):
        for b in range(6):
            ratios = ratio_BT[b][mask_BT[b]]
            weight_BT[b] = ratios.prod() ** (1 / len(ratios) if truncation == "geometric_mean" else 1)
    weight_BT = weight_BT.clamp(max=1.1)
    low, high = options.get("token_mask_range", (0.0, INF))
    weight_BT[(ratio_BT < low) | (ratio_BT > high)] = 0.0
    assert (weight_BT[mask_BT] == 1.1).any() and ((weight_BT[mask_BT] < 1.1) & (weight_BT[mask_BT] > 0)).any()

    def held_fixed(logp_BT: torch.Tensor) -> float:
        return float(-(weight_BT * advantages_BT * logp_BT)[mask_BT].sum())

    step = 1e-4
    for b in range(6):
        for t in range(7):
            shift_BT = torch.zeros(6, 7, dtype=torch.float64)
            shift_BT[b, t] = step
            numeric = (held_fixed(logp_train_BT + shift_BT) - held_fixed(logp_train_BT - shift_BT)) / (2 * step)
            assert float(grad_BT[b, t]) == pytest.approx(numeric, abs=1e-9)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("parts", [[[0], [1], [2], [3], [4], [5]], [[5, 0], [3], [1, 4, 2]]])
def test_independent_of_micro_batches_row_order_and_padding(options, parts):
    tensors = random_batch()
    whole_loss_BT, whole_grad_BT = loss_and_grad(tensors, 1.1, **options)
    for rows in parts:
        padding = (NAN, NAN, NAN, False)
        micro = [
            torch.cat([tensor[rows], torch.full((len(rows), 3), junk, dtype=tensor.dtype)], dim=1)
            for tensor, junk in zip(tensors, padding, strict=True)
        ]
        loss_BT, grad_BT = loss_and_grad(tuple(micro), 1.1, **options)
        # The sum over a longer row may associate its terms otherwise: 1e-14, not bits.
        torch.testing.assert_close(loss_BT[:, :7], whole_loss_BT[rows], rtol=1e-14, atol=0)
        torch.testing.assert_close(grad_BT[:, :7], whole_grad_BT[rows], rtol=1e-14, atol=0)
        assert not loss_BT[:, 7:].any() and not grad_BT[:, 7:].any()


def test_masked_tokens_count_in_the_ratio_of_their_sequence():
    """The mask judges tokens one by one; the ratio of a response is that of all that was sampled."""
    options = {"token_mask_range": RANGE, "sequence_truncation": "product"}
    assert float(loss_and_grad(hand_batch(), 100.0, **options)[1][0, 0]) == pytest.approx(-8 * 1.5)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("logp", [(NAN, -1.0), (-INF, -1.0), (-1.0, INF), (-1.0, NAN), (-3.4e38, -3.4e38)])
def test_unusable_token_changes_nothing_but_its_count(options, logp):
    tensors = tuple(tensor.clone() for tensor in hand_batch(pad=0.0))
    expected_BT, _ = loss_and_grad(tensors, **options)
    tensors[0][1, 2], tensors[1][1, 2], tensors[2][1, 2] = *logp, -0.5
    tensors[3][1, 2] = True
    loss_BT, grad_BT = loss_and_grad(tensors, **options)
    torch.testing.assert_close(loss_BT, expected_BT, rtol=1e-15, atol=0)
    assert float(grad_BT[1, 2]) == 0.0
    metrics = cispo_metrics(*tensors, **options)
    assert metrics["scalerl/loss/nonfinite_tokens_sum"] == (1.0, "sum")
    expected = cispo_metrics(*hand_batch(), **options)
    changed = {"scalerl/loss/nonfinite_tokens_sum"}
    assert {k: v for k, v in metrics.items() if k not in changed} == {
        k: v for k, v in expected.items() if k not in changed
    }


def test_impossible_token_is_out_of_range_and_caps_its_sequence():
    tensors = tuple(tensor.clone() for tensor in hand_batch(pad=0.0))
    tensors[1][0, 0] = -INF
    loss_BT, grad_BT = loss_and_grad(tensors, 5.0, token_mask_range=RANGE)
    assert float(loss_BT[0, 0]) == 0.0 == float(grad_BT[0, 0])
    _, grad_BT = loss_and_grad(tensors, 5.0, sequence_truncation="geometric_mean")
    torch.testing.assert_close(grad_BT[0], torch.full((3,), -7.5, dtype=torch.float64))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), options=st.sampled_from(OPTIONS))
def test_loss_gradient_and_metrics_are_finite_for_any_logprobs(data, options):
    rows = st.lists(st.floats(width=32), min_size=6, max_size=6)
    logp_train_BT = torch.tensor(data.draw(rows)).view(2, 3)
    logp_rollout_BT = torch.tensor(data.draw(rows)).view(2, 3)
    mask_BT = torch.tensor(data.draw(st.lists(st.booleans(), min_size=6, max_size=6))).view(2, 3)
    tensors = (logp_train_BT, logp_rollout_BT, torch.full((2, 3), 2.0), mask_BT)
    loss_BT, grad_BT = loss_and_grad(tensors, **options)
    assert torch.isfinite(loss_BT).all() and torch.isfinite(grad_BT).all()
    assert not loss_BT[~mask_BT].any() and not grad_BT[~mask_BT].any()
    assert float(grad_BT.abs().max()) <= 5.0 * 2.0 * (1 + 1e-6)
    assert all(math.isfinite(value) for value, _ in cispo_metrics(*tensors, **options).values())


def test_metrics_count_what_is_masked_and_weigh_what_is_left():
    """Range [3/4, 6] masks rho = 1/2 and 8 of five tokens; weights 5, 0, 0, 4, 4: sum 13, squares 57."""
    metrics = cispo_metrics(*hand_batch(), 5.0, RANGE, "product")
    assert metrics["scalerl/loss/out_of_range_tokens_sum"] == (2.0, "sum")
    assert metrics["scalerl/loss/out_of_range_frac"] == (pytest.approx(2 / 5), "mean")
    assert metrics["scalerl/loss/ess_frac"][0] == pytest.approx(13**2 / (5 * 57))
    # Both of row 0 that count as capped sit out of range, one in it; row 1's product 4 is below the cap.
    assert metrics["scalerl/loss/capped_frac_pos"][0] == pytest.approx(1 / 3)
    assert metrics["scalerl/loss/capped_frac_neg"][0] == 0.0
    assert metrics["scalerl/loss/ratio_max"][0] == pytest.approx(8.0), "ratios of tokens are reported as they are"
    assert metrics["scalerl/mismatch/sequence_log_ratio_abs_max"][0] == pytest.approx(3 * LN2)


def test_every_token_out_of_range_gives_zero_loss_and_finite_metrics():
    options = {"token_mask_range": [0.99, 1.01]}
    tensors = tuple(tensor[:1] for tensor in hand_batch())
    assert not loss_and_grad(tensors, **options)[0].any()
    assert cispo_metrics(*tensors, **options)["scalerl/loss/ess_frac"][0] == 0.0


@pytest.mark.parametrize(
    "token_range", [[0.5], [0.5, 2, 3], [2.0, 0.5], [1.0, 2.0], [0.5, 1.0], [-1, 2], [0.5, INF], [NAN, 2], "0.5_2", 2.0]
)
def test_refuses_a_range_that_is_none(token_range):
    for function in (cispo_token_loss, cispo_metrics):
        with pytest.raises(ValueError, match="low < 1 < high"):
            function(*hand_batch(), 5.0, token_range)


@pytest.mark.parametrize("truncation", ["token", "sequence", True])
def test_refuses_an_unknown_truncation(truncation):
    for function in (cispo_token_loss, cispo_metrics):
        with pytest.raises(ValueError, match="product, geometric_mean"):
            function(*hand_batch(), 5.0, None, truncation)
