# SPDX-License-Identifier: Apache-2.0
"""``algorithm.scalerl.fast_frontend`` against verl's way, request by request, on a real vLLM engine (CPU) behind our
server class, without Ray or a trainer: the same tokens, log-probs, reasons and facts, and aborts as verl means them.

The server is made without verl's constructor, which wants a Ray actor around it; everything from `generate` on is the
real thing. Whole runs with it are those of the preset ``recipe``: test_sync, test_colocate_async, test_separate_async,
test_pipeline, test_off_policy, test_interruption.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.launching import passed_checks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CHECKS = (
    "request ended by itself",
    "request of the greatest length",
    "request without log-probs",
    "request longer than the context",
    "request of one token",
    "request greedy",
    "request cut by top_k and top_p",
    "request with log-probs of the prompt",
    "request with more log-probs of the prompt",
    "request of a least length",
    "request in verl's other spelling",
    "request with a stop string",
    "request with a single stop string",
    "request with a stop string that stays in the text",
    "request with a stop string before its least length",
    "request with a stop token",
    "request with a stop token that stays in the text",
    "request with a bad word",
    "request that fails by no such parameter",
    "request that fails by a value that vLLM refuses",
    "request that fails by a token that is not in the vocabulary",
    "times of a request are measured",
    "streaming clients are served as before",
    "many requests at once",
    "abort of all gives back what was sampled",
    "request that comes after an abort waits for the end of the update",
    "aborted request goes on where it was",
    "abort of requests on their way into the engine",
    "request whose sender is gone",
)


@pytest.fixture(scope="module")
def passed(tiny_assets: Path) -> dict[str, str]:
    """Check -> what was seen, printed by one process that holds the engine."""
    return passed_checks("tests.e2e.frontend_requests", str(tiny_assets / "stopping"))


@pytest.mark.parametrize("check", CHECKS)
def test_request(check: str, passed: dict[str, str]) -> None:
    assert check in passed, f"not reached; reached: {sorted(passed)}"


def test_no_check_is_forgotten(passed: dict[str, str]) -> None:
    assert set(passed) == set(CHECKS)
