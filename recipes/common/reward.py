# SPDX-License-Identifier: Apache-2.0
"""The reward of the mathematics and code recipes: +1 for a right response, -1 for any other, as in the paper.

verl's own graders decide what is right; only what stands behind the thinking is graded.
"""

from __future__ import annotations

import json
from typing import Any

THINK_END = "</think>"
CODE_SOURCES = ("codecontests", "apps", "codeforces", "taco")
CODE_TIMEOUT_S = 5


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None = None, **kwargs: Any
) -> dict[str, float]:
    """Return the reward, 1.0 or -1.0, and the accuracy, 1.0 or 0.0, of one response.

    Args:
        data_source: `math_dapo`, or one of `CODE_SOURCES`.
        solution_str: the response.
        ground_truth: the answer as text; for code JSON with lists `inputs` and `outputs`.
        extra_info, kwargs: what verl passes along; not used.

    Raises:
        ValueError: a data source that is not graded here.
    """
    answer = solution_str.rpartition(THINK_END)[2]
    if data_source == "math_dapo":
        from verl.utils.reward_score import math_dapo

        right = math_dapo.compute_score(answer, str(ground_truth))["score"] > 0
    elif data_source in CODE_SOURCES:
        right = passes_tests(answer, ground_truth)
    else:
        raise ValueError(f"data_source {data_source!r} is not graded here: use math_dapo or {', '.join(CODE_SOURCES)}")
    return {"score": 1.0 if right else -1.0, "acc": 1.0 if right else 0.0}


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
