# SPDX-License-Identifier: Apache-2.0
"""The FP32 head in a real vLLM engine on the CPU: bf16 weights, tied and not, changed while the engine lives."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.launching import CPU_ENVIRONMENT
from tests.head_checks import EXACT, check_case, run_engines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_engines(tmp_path_factory.mktemp("engines"), "tied", "untied", **CPU_ENVIRONMENT)


@pytest.mark.fault("padded vocabulary, top-p and processed log-probs: NaN")
@pytest.mark.fault("tied embedding updated alone: a cloned head is stale")
@pytest.mark.fault("weights synced into the generator, a cached FP32 copy serves the old head")
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_log_probs_are_those_of_float64_and_follow_the_weights(engines: dict[str, Any], kind: str) -> None:
    """Padded vocabulary with top-p, processed log-probs, an update of the embedding alone if it is tied."""
    check_case(engines[kind])


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_layer_for_older_vllm_does_the_same_in_this_engine(engines: dict[str, Any], kind: str) -> None:
    """vLLM here has an FP32 head of its own; ours takes its place with that one switched off."""
    assert engines[kind]["replacement_dtype"] == "float32"
    assert engines[kind]["error_of_replacement"] <= EXACT
