# SPDX-License-Identifier: Apache-2.0
"""Forward and backward in one pass: the gradients of the separate passes, or an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from scalerl_verl.head import linear_logprobs, shared_pass_logprobs
from scalerl_verl.head.shared_pass import LossMismatchError
from scalerl_verl.loss.cispo import cispo_token_loss
from tests.unit.head.conftest import Case, make_case, relative_error

N, H, V = 90, 48, 301
# Only the order of the chunks' sums and one scaling differ (FP32), or the rounding of the result (bf16).
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}


class Cispo:
    """CISPO of a flat batch; `mask` False marks prompt tokens."""

    def __init__(self, case: Case):
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            logp = linear_logprobs(case.hidden, case.weight, case.labels).logp
        device = logp.device
        self.rollout = logp + torch.randn(N, generator=generator).to(device)
        self.advantages = torch.randn(N, generator=generator).to(device)
        self.mask = (torch.rand(N, generator=generator) > 0.4).to(device)

    def __call__(self, logp: torch.Tensor, at: slice) -> torch.Tensor:
        return cispo_token_loss(
            logp[None], self.rollout[None, at], self.advantages[None, at], self.mask[None, at], eps_max=1.5
        )[0]


def gradients(
    case: Case, head: Callable[..., tuple[torch.Tensor, torch.Tensor]], loss_of: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    case.hidden.grad = case.weight.grad = None
    logp, entropy = head(case.hidden, case.weight, case.labels)
    loss_of(logp).backward()
    return logp.detach(), entropy.detach(), case.hidden.grad, case.weight.grad


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("chunk_rows", [16, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_of_cispo(temperature: float, chunk_rows: int, dtype: torch.dtype, device: str) -> None:
    case = make_case(N, H, V, dtype, device)
    cispo = Cispo(case)

    def mean_loss(logp: torch.Tensor) -> torch.Tensor:
        return 8 * cispo(logp, slice(None)).sum() / cispo.mask.sum()

    options = {"temperature": temperature, "chunk_rows": chunk_rows}
    separate = gradients(case, lambda *operands: linear_logprobs(*operands, **options), mean_loss)
    shared = gradients(case, lambda *operands: shared_pass_logprobs(*operands, cispo, **options), mean_loss)
    assert torch.equal(shared[0], separate[0]) and torch.equal(shared[1], separate[1])
    for value, expected in zip(shared[2:], separate[2:], strict=True):
        assert value.dtype == dtype
        assert relative_error(value, expected) < TOLERANCE[dtype]


def test_a_token_loss_may_be_any_function_of_its_log_probability(device: str) -> None:
    case = make_case(N, H, V, torch.float32, device)
    separate = gradients(case, linear_logprobs, lambda logp: (logp.exp() * case.grad_logp).mean())
    shared = gradients(
        case,
        lambda *operands: shared_pass_logprobs(*operands, lambda logp, at: logp.exp() * case.grad_logp[at]),
        lambda logp: (logp.exp() * case.grad_logp).mean(),
    )
    assert relative_error(shared[3], separate[3]) < 1e-5


def test_masked_tokens_contribute_nothing_whatever_they_hold(device: str) -> None:
    case = make_case(N, H, V, torch.bfloat16, device)
    cispo = Cispo(case)

    def run() -> tuple[torch.Tensor, ...]:
        return gradients(
            case,
            lambda *operands: shared_pass_logprobs(*operands, cispo, chunk_rows=32),
            lambda logp: cispo(logp, slice(None)).sum(),
        )

    clean = run()
    with torch.no_grad():
        case.hidden[~cispo.mask] = torch.nan
    poisoned = run()
    assert torch.equal(clean[2], poisoned[2]) and torch.equal(clean[3], poisoned[3])
    assert clean[3].any()


def test_a_token_of_almost_no_probability_does_not_end_the_step(device: str) -> None:
    """Its ratio, e^-85, times the average's factor is a denormal number, of which FP32 keeps a few bits."""
    case = make_case(N, H, V, torch.float32, device)
    cispo = Cispo(case)
    cispo.mask[3] = True
    with torch.no_grad():
        cispo.rollout[3] = linear_logprobs(case.hidden, case.weight, case.labels).logp[3] + 85
    separate = gradients(case, linear_logprobs, lambda logp: cispo(logp, slice(None)).sum() / 400_000)
    shared = gradients(
        case,
        lambda *operands: shared_pass_logprobs(*operands, cispo),
        lambda logp: cispo(logp, slice(None)).sum() / 400_000,
    )
    assert relative_error(shared[3], separate[3]) < 1e-5


def test_a_batch_without_signal_has_no_gradient(device: str) -> None:
    case = make_case(N, H, V, torch.bfloat16, device)
    cispo = Cispo(case)
    cispo.advantages.zero_()
    *_, grad_hidden, grad_weight = gradients(
        case, lambda *operands: shared_pass_logprobs(*operands, cispo), lambda logp: cispo(logp, slice(None)).mean()
    )
    assert not grad_hidden.any() and not grad_weight.any()


def test_without_gradients_it_is_a_plain_forward(device: str) -> None:
    case = make_case(N, H, V, torch.bfloat16, device)

    def never(logp: torch.Tensor, at: slice) -> torch.Tensor:
        raise AssertionError("a gradient is being made")

    with torch.no_grad():
        logp, _ = shared_pass_logprobs(case.hidden, case.weight, case.labels, never)
    assert torch.equal(logp, linear_logprobs(case.hidden, case.weight, case.labels).logp)


def per_sequence(logp: torch.Tensor, cispo: Cispo) -> torch.Tensor:
    """Two sequences of unlike length, averaged apart: no single factor."""
    loss = cispo(logp, slice(None))
    return loss[:20].mean() + loss[20:].mean()


WRONG = {
    "another loss": lambda logp, cispo: -(logp * cispo.advantages * cispo.mask).sum(),
    "another weight per token": per_sequence,
    "an entropy-like extra term": lambda logp, cispo: cispo(logp, slice(None)).sum() + 0.01 * logp.sum(),
    "a masked token that trains": lambda logp, cispo: (
        cispo(logp, slice(None)).sum() + 1e-3 * logp[int((~cispo.mask).nonzero()[0])]
    ),
    "a gradient that is NaN": lambda logp, cispo: cispo(logp, slice(None)).sum() * torch.nan,
    "half the batch": lambda logp, cispo: cispo(logp, slice(None))[: N // 2].sum(),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_is_not_the_one_told_is_an_error(name: str, device: str) -> None:
    case = make_case(N, H, V, torch.float32, device)
    cispo = Cispo(case)
    logp, _ = shared_pass_logprobs(case.hidden, case.weight, case.labels, cispo)
    with pytest.raises(LossMismatchError, match=r"not .* times that loss's"):
        WRONG[name](logp, cispo).backward()


def test_the_entropy_has_no_gradient(device: str) -> None:
    case = make_case(N, H, V, torch.float32, device)
    _, entropy = shared_pass_logprobs(case.hidden, case.weight, case.labels, Cispo(case))
    assert not entropy.requires_grad


def test_a_reduced_token_loss_is_refused(device: str) -> None:
    case = make_case(N, H, V, torch.float32, device)
    with pytest.raises(ValueError, match="without reducing"):
        shared_pass_logprobs(case.hidden, case.weight, case.labels, lambda logp, at: logp.sum())
