# SPDX-License-Identifier: Apache-2.0
"""The reward of the mathematics and code recipes: +1 for a right response, -1 for any other, as in the paper.

verl's own graders decide what is right. Only the answer is graded: what stands behind the last `</think>`. A response
that ended inside its thinking has no answer and is wrong, whatever draft it holds.

A mathematical answer is compared as text first. With `math_grader=math_verify` one that is another text is compared as
mathematics (1/2, 0.5 and \\frac{1}{2} are the same): by math-verify, in a process that is ended after a time limit.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import multiprocessing
import queue
import re
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

CODE_SOURCES = ("codecontests", "apps", "codeforces", "taco")
CODE_TIMEOUT_S = 5
RECORD_KEY = "scalerl_length"
"""Where the agent loop `forced_interruption` says what became of a response; verl hands it on in `extra_info`."""
TEXT, MATH_VERIFY = "text", "math_verify"
MATH_TIMEOUT_S = 15.0
"""math-verify stops by itself after 5 s of parsing either side and 5 s of comparing; what it cannot stop ends here."""
_START_TIMEOUT_S = 300.0
"""Of a process that imports SymPy on a busy machine."""
_NUM_PROCESSES = 2
_LONGEST = 300
"""Characters from the end in which verl's grader looks for the answer, too."""
_logger = logging.getLogger(__name__)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict | None = None,
    thinks_from_start: bool = False,
    start_marker: str = "<think>",
    end_marker: str = "</think>",
    math_grader: str = TEXT,
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
        math_grader: `text`, or `math_verify`, which needs the package math-verify.
        kwargs: not used.

    Raises:
        ValueError: a data source that is not graded here, another `math_grader`, or an end marker that the text has
            lost.
        ModuleNotFoundError: `math_verify` without its package.
    """
    if math_grader not in (TEXT, MATH_VERIFY):
        raise ValueError(f"math_grader={math_grader!r} does not exist: use {TEXT} or {MATH_VERIFY}")
    if data_source != "math_dapo" and data_source not in CODE_SOURCES:
        raise ValueError(f"data_source {data_source!r} is not graded here: use math_dapo or {', '.join(CODE_SOURCES)}")
    outcome = ((extra_info or {}).get(RECORD_KEY) or {}).get("outcome")
    answer = find_answer(solution_str, outcome, thinks_from_start, start_marker, end_marker)
    right = answer is not None and is_right(data_source, answer, ground_truth, math_grader)
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


def is_right(data_source: str, answer: str, ground_truth: Any, math_grader: str = TEXT) -> bool:
    """Whether verl's grader for a data source takes the answer."""
    if data_source in CODE_SOURCES:
        return passes_tests(answer, ground_truth)
    from verl.utils.reward_score import math_dapo

    if math_dapo.compute_score(answer, str(ground_truth))["score"] > 0:
        return True
    if math_grader == TEXT:
        return False
    given = boxed_answer(answer)
    return given is not None and means_the_same(given, str(ground_truth))


def boxed_answer(answer: str) -> str | None:
    """What an answer says on its last line `Answer: ...`, else in its last box, as LaTeX; None without either."""
    from verl.utils.reward_score.math_dapo import last_boxed_only_string

    end = answer[-_LONGEST:]
    lines = re.findall(r"(?i)answer\s*:\s*([^\n]+)", end)
    if not lines:
        found: str | None = last_boxed_only_string(end)
        return found
    line = lines[-1].strip().rstrip(".")
    return line if "\\boxed" in line else f"\\boxed{{{line.replace('$', '')}}}"


def means_the_same(given: str, ground_truth: str) -> bool:
    """Whether math-verify takes two answers in LaTeX for the same, within `MATH_TIMEOUT_S`.

    Raises:
        ModuleNotFoundError: math-verify is not installed; verl would take every answer for a wrong one.
    """
    if importlib.util.find_spec(MATH_VERIFY) is None:
        raise ModuleNotFoundError(
            f"math_grader={MATH_VERIFY} needs the package math-verify on every node: pip install 'scalerl-verl[math]', "
            f"or set reward.custom_reward_function.reward_kwargs.math_grader={TEXT}"
        )
    from verl.utils.reward_score.math_verify import _verify_in_subprocess

    grader = _free.get()
    try:
        return bool(grader.call(_verify_in_subprocess, f"\\boxed{{{ground_truth}}}", given))
    finally:
        _free.put(grader)


class Grader:
    """A process that answers one call at a time, and is replaced where a call does not end.

    verl's pool goes on with a process that hangs, and counts the time that an answer waits for one.
    """

    _pool: ProcessPoolExecutor | None = None

    def call(self, function: Any, *arguments: Any, timeout_s: float = MATH_TIMEOUT_S) -> Any:
        """What the function returns; None where it took too long, or ended its process."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
            self._pool.submit(exec, f"import {function.__module__}").result(_START_TIMEOUT_S)
        try:
            return self._pool.submit(function, *arguments).result(timeout_s)
        except (TimeoutError, BrokenProcessPool) as error:
            _logger.warning(f"an answer was not graded and counts as wrong: {error!r}, {arguments!r}"[:1000])
            self.end()
            return None

    def end(self) -> None:
        """End the process, whatever it does."""
        pool, self._pool = self._pool, None
        if pool is not None:
            for process in (pool._processes or {}).values():
                process.kill()
            pool.shutdown(wait=False, cancel_futures=True)


_free: queue.SimpleQueue[Grader] = queue.SimpleQueue()
"""Graders that nobody uses at the moment; threads of the reward worker wait for one. Processes start when called."""
for _ in range(_NUM_PROCESSES):
    _free.put(Grader())


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
