# SPDX-License-Identifier: Apache-2.0
"""The reward: reasoning-gym's own verifier on what a response answers; for verl's `reward.custom_reward_function.path`.

+1 for a right answer, -1 for any other, as in the paper. Only what stands behind the last `</think>` is looked at, so a
draft inside the thinking counts for nothing. A verifier that gives part of the points gives none here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

SOURCE_PREFIX = "reasoning_gym/"
END_MARKER = "</think>"
ANSWER_TAG = "answer"


@functools.cache
def verifier_of(family: str) -> Callable[[str | None, dict[str, Any]], float]:
    """The verifier of a family of reasoning-gym, which grades with 0 to 1."""
    # From the package, never from its module `factory`, which is there before the families are: responses are graded in
    # threads, and another one may be importing the package at this moment.
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(family)


def find_answer(response: str) -> str | None:
    """The last answer between tags behind the thinking; None if the thinking was not closed or no answer follows."""
    from reasoning_gym.utils import extract_answer

    _, closed, answer = response.rpartition(END_MARKER)
    return extract_answer(answer, ANSWER_TAG) if closed else None


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **kwargs: Any
) -> dict[str, float]:
    """Return the reward, 1.0 or -1.0, and the accuracy, 1.0 or 0.0, of one response.

    Args:
        data_source: `reasoning_gym/` and the family.
        solution_str: the response.
        ground_truth: the problem's answer and metadata as JSON, which the verifier asks for.
        extra_info, kwargs: what verl passes along; not used.

    Raises:
        ValueError: another data source.
    """
    family = data_source.removeprefix(SOURCE_PREFIX)
    if family == data_source:
        raise ValueError(
            f"this reward grades data sources {SOURCE_PREFIX}FAMILY, got {data_source!r}: use the files of problems.py"
        )
    answer = find_answer(solution_str)
    right = answer is not None and verifier_of(family)(answer, json.loads(ground_truth)) == 1
    return {"score": 1.0 if right else -1.0, "acc": 1.0 if right else 0.0}
