# SPDX-License-Identifier: Apache-2.0
"""The reward of the mathematics and code recipes: +1 for a right response, -1 for any other, as in the paper.

verl's own graders decide what is right. Only the answer is graded: what stands behind the last `</think>`. A response
that ended inside its thinking has no answer and is wrong, whatever draft it holds.
"""

from __future__ import annotations

import json
from typing import Any

CODE_SOURCES = ("codecontests", "apps", "codeforces", "taco")
CODE_TIMEOUT_S = 5
RECORD_KEY = "scalerl_length"
"""Where the agent loop `forced_interruption` says what became of a response; verl hands it on in `extra_info`."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict | None = None,
    thinks_from_start: bool = False,
    start_marker: str = "<think>",
    end_marker: str = "</think>",
    **kwargs: Any,
) -> dict[str, float]:
    """Return the reward, 1.0 or -1.0, and the accuracy, 1.0 or 0.0, of one response.

    Args:
        data_source: `math_dapo`, or one of `CODE_SOURCES`.
        solution_str: the response.
        ground_truth: the answer as text; for code JSON with lists `inputs` and `outputs`.
        extra_info: what verl passes along, with the record of `forced_interruption`.
        thinks_from_start, start_marker, end_marker: see `find_answer`; from
            `reward.custom_reward_function.reward_kwargs`.
        kwargs: not used.

    Raises:
        ValueError: a data source that is not graded here, or an end marker that the text has lost.
    """
    if data_source != "math_dapo" and data_source not in CODE_SOURCES:
        raise ValueError(f"data_source {data_source!r} is not graded here: use math_dapo or {', '.join(CODE_SOURCES)}")
    outcome = ((extra_info or {}).get(RECORD_KEY) or {}).get("outcome")
    answer = find_answer(solution_str, outcome, thinks_from_start, start_marker, end_marker)
    right = answer is not None and is_right(data_source, answer, ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": 1.0 if right else 0.0}


def find_answer(
    response: str, outcome: str | None, thinks_from_start: bool, start_marker: str, end_marker: str
) -> str | None:
    """What stands behind the last end of the thinking; None if the response ended inside its thinking.

    Whether a response without any marker was thinking depends on what stood in front of it. `forced_interruption` has
    seen that and tells in its record; with another agent loop `thinks_from_start` tells for all responses.

    Args:
        response: its text.
        outcome: of the record: `natural`, `interrupted`, `unclosed` or `no_thinking`; None without a record.
        thinks_from_start: the chat template ends in the start marker, or the model thinks without one.
        start_marker, end_marker: what thinking begins and ends with.

    Raises:
        ValueError: the thinking was closed, but the text has no end marker.
    """
    _, closed, answer = response.rpartition(end_marker)
    if not closed and outcome in ("natural", "interrupted"):
        raise ValueError(
            f"the thinking was closed, but the text of the response has no {end_marker!r}: give "
            "reward.custom_reward_function.reward_kwargs.end_marker the marker of algorithm.scalerl.interruption; a "
            "marker that is a special token of the tokenizer is left out of the text and cannot be graded by"
        )
    opened = outcome == "unclosed" if outcome is not None else thinks_from_start
    if start_marker in answer or (opened and not closed):
        return None
    return answer


def is_right(data_source: str, answer: str, ground_truth: Any) -> bool:
    """Whether verl's grader for a data source takes the answer."""
    if data_source in CODE_SOURCES:
        return passes_tests(answer, ground_truth)
    from verl.utils.reward_score import math_dapo

    return bool(math_dapo.compute_score(answer, str(ground_truth))["score"] > 0)


def passes_tests(answer: str, tests: Any) -> bool:
    """Whether the last Python block of an answer passes every test, in verl's runner.

    It runs the program in a process of its own with a time limit. That is no sandbox: run it where nothing is lost, or
    let verl grade through a sandbox (`reward.sandbox_fusion`).
    """
    from verl.utils.reward_score.prime_code.utils import check_correctness

    if "```python" not in answer:
        return False
    code = answer.rpartition("```python")[2].partition("```")[0]
    cases = json.loads(tests) if isinstance(tests, str) else tests
    results, _ = check_correctness(in_outs=cases, generation=code, timeout=CODE_TIMEOUT_S, debug=False)
    # Its lists hold True for a pass; a wrong answer is False, an error a negative number.
    return bool(results) and all(result is True for result in results)
