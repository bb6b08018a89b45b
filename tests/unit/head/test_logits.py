# SPDX-License-Identifier: Apache-2.0
"""FP32 logits: values and gradients against float64, storage untouched."""

from __future__ import annotations

import pytest
import torch

from scalerl_verl.head import fp32_logits
from tests.unit.head.conftest import make_case, relative_error

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-3}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_values_and_gradients(dtype: torch.dtype, with_bias: bool, device: str) -> None:
    case = make_case(60, 64, 301, dtype, device)
    bias = torch.linspace(-1, 1, 301, device=device).to(dtype) if with_bias else None
    hidden, weight = case.hidden.detach(), case.weight.detach()
    exact = hidden.double() @ weight.double().t() + (0 if bias is None else bias.double())
    upstream = torch.randn(60, 301, generator=torch.Generator().manual_seed(1)).to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = fp32_logits(case.hidden.view(3, 20, 64), case.weight, bias)
        (logits.view(60, 301) * upstream).sum().backward()
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative_error(logits.view(60, 301), exact) < 1e-6
    assert relative_error(case.hidden.grad, upstream.double() @ weight.double()) < TOLERANCE[dtype]
    assert relative_error(case.weight.grad, upstream.double().t() @ hidden.double()) < TOLERANCE[dtype]
    assert case.weight.dtype == case.weight.grad.dtype == dtype


def test_sixteen_bit_logits_would_not_do(device: str) -> None:
    """The tolerance above tells FP32 logits from rounded ones by three orders of magnitude."""
    case = make_case(60, 64, 301, torch.bfloat16, device)
    exact = case.hidden.detach().double() @ case.weight.detach().double().t()
    assert relative_error(case.hidden.detach() @ case.weight.detach().t(), exact) > 1e-3
