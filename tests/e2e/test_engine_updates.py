# SPDX-License-Identifier: Apache-2.0
"""Weight updates under running requests, on a real vLLM engine (CPU) behind our server class, without Ray or a trainer:
of two ranks with an output layer of its own, and of one with tied weights and the fast front end. The runs of
test_pipeline have engines of one rank.

The server is made without verl's constructor, which wants a Ray actor around it; everything from `generate` on is the
real thing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.launching import make_even_model, passed_checks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CHECKS = (
    "prefix of the same version is reused",
    "prefix of older weights is not reused",
    "waiting request starts under the new weights with a fresh prefix",
    "reset_prefix_cache alone does nothing while requests are kept",
    "kept requests span versions and lose nothing",
    "log-probs equal those recomputed piecewise",
    "a prompt in chunks keeps the KV of those before an update",
    "a continuation finds its own prefix, whichever versions computed it",
    "log-probs of a continuation are those of the KV that it found",
    "what several versions computed is not found by another response",
    "two updates without staging, with recompute, are those of a fresh load each",
    "recompute prefills running requests again",
    "log-probs after recompute are those of the new weights",
    "a swap pauses for itself alone and the engine goes on by itself",
    "weights that do not fit are an error, and the engine stays paused",
    "tokens beyond a stop string or an abort are neither kept nor lost",
    "a hung engine gives its requests back",
    "an engine that dies in a swap is an error for the update and for requests that wait",
    "abort by our id ends the request in the engine",
    "abort of an unknown id says so",
    "abort of a request that waits for an update keeps it out of the engine",
)


@pytest.fixture(scope="module", params=[("2", "plain"), ("1", "fast")], ids=["two ranks", "fast front end"])
def passed(
    tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, str]:
    """Check -> what was seen, printed by one process that holds the engine.

    Each loads several versions by either way (staged in host memory, or during the pause), keeps and recomputes KV
    under each, and compares log-probs with a fresh load of the version.
    """
    ranks, front_end = request.param
    model = make_even_model(tiny_assets, tmp_path_factory.mktemp("even_model"), tied=ranks == "1")
    return passed_checks("tests.e2e.engine_updates", str(model), ranks, front_end)


@pytest.mark.fault("the prefix cache serves a new request KV of old weights")
@pytest.mark.fault("the engine's ids are not ours: an abort does nothing and says nothing")
@pytest.mark.parametrize("check", CHECKS)
def test_update(check: str, passed: dict[str, str]) -> None:
    assert check in passed, f"not reached; reached: {sorted(passed)}"


def test_no_check_is_forgotten(passed: dict[str, str]) -> None:
    assert set(passed) == set(CHECKS)
