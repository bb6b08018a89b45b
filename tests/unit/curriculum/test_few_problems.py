# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from scalerl_verl.curriculum.few_problems import FEW_STEPS, few_problems_warning


def test_run_that_was_measured_to_fall_is_warned_of() -> None:
    """2,048 problems, 32 a step, 224 steps: 3.5 passes."""
    warning = few_problems_warning(2048, 32, 224)
    assert warning is not None and "64 optimizer steps" in warning and "224" in warning


@pytest.mark.parametrize(
    ("problems", "a_step", "steps"),
    [(53_000, 48, 7_400), (16_384, 32, 1_600), (FEW_STEPS * 32, 32, 10_000), (2048, 32, 128)],
    ids=["the paper's", "512 steps a pass", "just enough", "two passes"],
)
def test_other_runs_are_not(problems: int, a_step: int, steps: int) -> None:
    assert few_problems_warning(problems, a_step, steps) is None


def test_one_step_more_than_two_passes_is() -> None:
    assert few_problems_warning(2048, 32, 129) is not None
