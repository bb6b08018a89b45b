# SPDX-License-Identifier: Apache-2.0
"""Both sides or neither: what the driver makes of each side's record and of the first batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from scalerl_verl.errors import HeadError
from scalerl_verl.head.agreement import (
    compare_first_batch,
    describe_records,
    find_disagreements,
    on_policy_rows,
)

SIDES = ("trainer", "generator")
TRAINER = {"backend": "fp32", "weight_dtype": "bfloat16", "max_error": 1e-5, "tolerance": 1e-3}
GENERATOR = {
    "side": "generator",
    "dtype": "float32",
    "weight_dtype": "bfloat16",
    "max_abs_error": 4e-6,
    "relative_error": 1e-7,
}


def records(trainer: list[Any], generator: list[Any]) -> dict[str, list[list[dict[str, Any]]]]:
    return {"trainer": trainer, "generator": generator}


def test_fp32_on_both_sides_agrees() -> None:
    both = records([[TRAINER], [TRAINER]], [[GENERATOR]])
    assert find_disagreements(both, SIDES) == []
    assert describe_records(both) == (
        "FP32 head against float64: trainer off by 1e-05 at most (2 processes, bfloat16 weights); "
        "generator off by 4e-06 at most (1 processes, bfloat16 weights)"
    )


@pytest.mark.fault("FP32 in the trainer or the generator only")
@pytest.mark.parametrize(
    ("trainer", "generator", "words"),
    [
        ([[TRAINER]], [[]], "1 of 1 processes of the generator measured no FP32 head"),
        ([[TRAINER], []], [[GENERATOR]], "1 of 2 processes of the trainer measured no FP32 head"),
        ([[TRAINER]], [], "0 of 0 processes of the generator"),
        ([[TRAINER]], [[{**GENERATOR, "dtype": "bfloat16", "relative_error": 2e-3}]], "bfloat16 logits"),
        ([[TRAINER]], [[{**GENERATOR, "relative_error": 3e-4}]], "0.0003 of their size"),
        ([[TRAINER]], [[{**GENERATOR, "relative_error": math.nan}]], "nan of their size"),
        ([[{**TRAINER, "max_error": 0.03}]], [[GENERATOR]], "off by 0.03"),
    ],
)
def test_one_sided_head_is_found_with_its_numbers(trainer: list[Any], generator: list[Any], words: str) -> None:
    """Field: FP32 on one side only makes a larger mismatch than none."""
    (problem,) = find_disagreements(records(trainer, generator), SIDES)
    assert words in problem


def test_a_side_that_was_not_asked_is_not_judged() -> None:
    assert find_disagreements(records([[]], [[GENERATOR]]), ["generator"]) == []


def test_first_batch_counts_only_rows_of_the_initial_weights() -> None:
    tags = [
        {"min_global_steps": 4, "max_global_steps": 4},
        {"min_global_steps": 3, "max_global_steps": 4},
        {"min_global_steps": 3, "max_global_steps": 3},
        {"min_global_steps": 4, "max_global_steps": 4, "is_padding": True},
        {"min_global_steps": None, "max_global_steps": None},
    ]
    assert on_policy_rows(tags, 4).tolist() == [True, False, False, False, False]


def test_first_batch_is_measured_and_masked_positions_do_not_matter() -> None:
    logp_BT = torch.tensor([[-1.0, -2.0, math.nan]])
    recorded_BT = logp_BT + torch.tensor([[1e-5, -3e-5, 0.0]])
    mask_BT = torch.tensor([[True, True, False]])
    measured = compare_first_batch(logp_BT, recorded_BT, mask_BT, 1e-4)
    prefix = "scalerl/mismatch/first_batch_log_ratio_abs"
    assert measured == pytest.approx({f"{prefix}_mean": 2e-5, f"{prefix}_max": 3e-5}, rel=1e-2)


@pytest.mark.parametrize(
    ("offset", "words"),
    [(0.01, r"mean \|log-ratio\| 0.01 "), (math.nan, "3 of 3 log-probs are NaN"), (-math.inf, "are NaN, infinite")],
)
def test_first_batch_that_disagrees_ends_the_run_with_the_numbers(offset: float, words: str) -> None:
    logp_BT = torch.full((1, 3), -1.0)
    with pytest.raises(HeadError, match=words):
        compare_first_batch(logp_BT, logp_BT + offset, torch.ones(1, 3, dtype=torch.bool), 1e-4)


def test_log_probs_that_are_no_probabilities_do_not_agree_perfectly() -> None:
    """A masked logit's -2e9 is finite, and left out of every mean."""
    recorded_BT = torch.full((1, 3), -1.0)
    with pytest.raises(HeadError, match="3 of 3 log-probs are NaN"):
        compare_first_batch(torch.full((1, 3), -2e9), recorded_BT, torch.ones(1, 3, dtype=torch.bool), 1e-4)


def test_nothing_is_reported_where_nothing_was_compared() -> None:
    logp_BT = torch.full((1, 3), -1.0)
    assert compare_first_batch(logp_BT, logp_BT, torch.zeros(1, 3, dtype=torch.bool), 1e-4) == {}
