# SPDX-License-Identifier: Apache-2.0
"""The FP32 head in vLLM on a GPU: both model runners, sleep and wake-up, weights changed while the engine lives."""

from __future__ import annotations

from typing import Any

import pytest
from packaging.version import Version

from scalerl_verl.upstream.spec import installed_version
from tests.head_checks import check_case, run_engines

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

CASES = ("tied-sleep", "untied-v2")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Two engines in one process: what takes long is importing vLLM."""
    return run_engines(tmp_path_factory.mktemp("engines"), *CASES)


@pytest.mark.parametrize("case", CASES)
def test_log_probs_are_those_of_float64_and_follow_the_weights(engines: dict[str, Any], case: str) -> None:
    check_case(engines[case])


def test_layer_is_ours_where_vllm_has_none(engines: dict[str, Any]) -> None:
    version = installed_version("vllm")
    assert version is not None
    expected = "Fp32LogitsProcessor" if Version(version) < Version("0.26") else "LogitsProcessor"
    assert {found["layer"] for found in engines.values()} == {expected}


def test_both_model_runners_were_used(engines: dict[str, Any]) -> None:
    assert [engines[case]["runner"] for case in CASES] == [
        "vllm.v1.worker.gpu_model_runner",
        "vllm.v1.worker.gpu.model_runner",
    ]


@pytest.mark.fault("sleep and wake-up of the engine: a stale head")
def test_head_follows_after_sleep_and_wake_up(engines: dict[str, Any]) -> None:
    assert engines["tied-sleep"]["error_after_sleep"] <= 1e-4
