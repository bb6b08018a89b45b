# SPDX-License-Identifier: Apache-2.0
"""math-verify in the recipes' reward: what it takes that text does not, and answers that it would compute for ever."""

from __future__ import annotations

import builtins
import importlib.util
import os
import time
from collections.abc import Iterator

import pytest

from recipes.common import reward
from recipes.common.reward import Grader, boxed_answer, compute_score

RIGHT, WRONG = {"score": 1.0, "acc": 1.0}, {"score": -1.0, "acc": 0.0}


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    graders = [reward._free.get() for _ in range(reward._NUM_PROCESSES)]
    for grader in graders:
        grader.end()
        reward._free.put(grader)


@pytest.mark.parametrize(
    ("answer", "boxed"),
    [
        ("So it is 4.\nAnswer: $\\frac{1}{2}$.", "\\boxed{\\frac{1}{2}}"),
        ("Answer: 3\nno\nanswer : 4", "\\boxed{4}"),
        ("Answer: \\boxed{x+1}", "\\boxed{x+1}"),
        ("It is \\boxed{4}, not 5", "\\boxed{4}"),
        ("It is 4", None),
        ("Answer: 4" + "." * 400, None),
    ],
)
def test_answer_is_the_last_line_or_the_last_box(answer: str, boxed: str | None) -> None:
    assert boxed_answer(answer) == boxed


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("1/2", "\\frac{1}{2}", True),
        ("0.5", "\\frac{1}{2}", True),
        ("$1+2x$", "2x+1", True),
        ("\\sqrt{8}", "2\\sqrt{2}", True),
        ("10^{10}", "10000000000", True),
        ("\\frac{1}{3}", "0.5", False),
        ("2x-1", "2x+1", False),
        ("", "4", False),
    ],
)
def test_answers_that_mean_the_same_are_right(answer: str, truth: str, right: bool) -> None:
    response = f"hm</think>So:\nAnswer: {answer}"
    assert compute_score("math_dapo", response, truth, math_grader="math_verify") == (RIGHT if right else WRONG)
    assert compute_score("math_dapo", response, truth) == WRONG, "as text these differ"


def test_what_is_the_same_text_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward, "means_the_same", lambda *_: pytest.fail("asked"))
    assert compute_score("math_dapo", "Answer: 4", "4", math_grader="math_verify") == RIGHT
    assert compute_score("math_dapo", "Four.", "4", math_grader="math_verify") == WRONG, "nothing to compare"


def test_call_that_does_not_end_is_ended_and_the_next_one_is_answered() -> None:
    grader = Grader()
    assert grader.call(time.sleep, 600, timeout_s=1.0) is None
    first = grader.call(os.getpid)
    assert grader.call(os._exit, 1) is None
    assert grader.call(builtins.abs, -3) == 3
    assert first != grader.call(os.getpid) != os.getpid()
    grader.end()


def test_grader_without_its_package_and_one_that_does_not_exist_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="use text or math_verify"):
        compute_score("math_dapo", "Answer: 4", "4", math_grader="sympy")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install 'scalerl-verl\\[math\\]'"):
        compute_score("math_dapo", "Answer: 0.5", "1/2", math_grader="math_verify")
