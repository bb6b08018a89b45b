# SPDX-License-Identifier: Apache-2.0
"""Row sums, token counts and broadcasts equal their plain definitions, whatever stands at masked positions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from scalerl_verl.advantage.rows import count_tokens, spread_rows, sum_rows

MASK_BT = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_sum_reads_unmasked_positions_only(dtype: torch.dtype, junk: float) -> None:
    values_BT = torch.tensor([[1.0, 2.0, junk], [junk, junk, junk], [0.5, junk, -2.0]], dtype=dtype)
    sums_B = sum_rows(values_BT, MASK_BT)
    assert sums_B.dtype == np.float64
    assert sums_B.tolist() == [3.0, 0.0, -1.5]


def test_sum_is_taken_in_float64() -> None:
    values_BT = torch.tensor([[2.0**24, 1.0, 1.0]])
    assert sum_rows(values_BT, torch.ones(1, 3, dtype=torch.bool)).tolist() == [2.0**24 + 2]


def test_tokens_are_counted_per_row() -> None:
    assert count_tokens(MASK_BT).tolist() == [2, 0, 2]
    assert count_tokens(MASK_BT[:0]).tolist() == []
    assert count_tokens(MASK_BT.T).tolist() == MASK_BT.sum(0).tolist(), "a view that is not contiguous counts too"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_are_spread_over_their_tokens_in_the_dtype_asked_for(dtype: torch.dtype) -> None:
    spread_BT = spread_rows(np.array([0.5, 7.0, -2.0]), MASK_BT, like=torch.zeros(1, dtype=dtype))
    assert spread_BT.dtype == dtype
    assert spread_BT.tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0], [-2.0, 0.0, -2.0]]
    spread_BT += 1.0
    assert spread_BT[1, 1] == 1.0, "the result is an ordinary tensor that may be written"
