# SPDX-License-Identifier: Apache-2.0
"""Cases shared by the tests of the head. Every test takes `device` and so runs on CUDA where there is one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@dataclass
class Case:
    """Operands of a head; `grad_logp` and `grad_entropy` are upstream gradients."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    grad_logp: torch.Tensor
    grad_entropy: torch.Tensor


def make_case(num_tokens: int, num_hidden: int, num_vocab: int, dtype: torch.dtype, device: str, seed: int = 0) -> Case:
    """Random operands whose logits have a standard deviation of about 3, as those of a trained model."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return Case(
        hidden=normal(num_tokens, num_hidden).to(device, dtype).requires_grad_(),
        weight=(normal(num_vocab, num_hidden) * 3 / num_hidden**0.5).to(device, dtype).requires_grad_(),
        labels=torch.randint(num_vocab, (num_tokens,), generator=generator).to(device),
        grad_logp=normal(num_tokens).to(device),
        grad_entropy=normal(num_tokens).to(device),
    )


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth, in float64."""
    difference, scale = (value.double() - truth.double()).norm(), truth.double().norm()
    return float(difference / scale) if scale > 0 else float(difference)
