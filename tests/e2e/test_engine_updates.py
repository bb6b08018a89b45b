# SPDX-License-Identifier: Apache-2.0
"""Weight updates under running requests, on a real vLLM engine of two ranks (CPU) behind our server class, without Ray
or a trainer. The runs of test_pipeline have engines of one rank.

The server is made without verl's constructor, which wants a Ray actor around it; everything from `generate` on is the
real thing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launching import CPU_ENVIRONMENT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CHECKS = (
    "prefix of the same version is reused",
    "prefix of older weights is not reused",
    "waiting request starts under the new weights with a fresh prefix",
    "reset_prefix_cache alone does nothing while requests are kept",
    "kept requests span versions and lose nothing",
    "log-probs equal those recomputed piecewise",
    "a prompt in chunks keeps the KV of those before an update",
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


@pytest.fixture(scope="module")
def even_model(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a number of heads that two ranks can share."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("even_model")
    config = AutoConfig.from_pretrained(tiny_assets / "model")
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_assets / "model").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def passed(even_model: Path) -> dict[str, str]:
    """Check -> what was seen, printed by one process that holds the engine."""
    env = {**os.environ, **CPU_ENVIRONMENT, "SCALERL_VERL_ACTIVE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "tests.e2e.engine_updates", str(even_model), "2"]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=500, cwd=Path(__file__).resolve().parents[2]
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    lines = [line.removeprefix("PASSED ") for line in done.stdout.splitlines() if line.startswith("PASSED ")]
    return dict(line.split(" | ", 1) for line in lines)


@pytest.mark.fault("the prefix cache serves a new request KV of old weights")
@pytest.mark.fault("the engine's ids are not ours: an abort does nothing and says nothing")
@pytest.mark.parametrize("check", CHECKS)
def test_update(check: str, passed: dict[str, str]) -> None:
    assert check in passed, f"not reached; reached: {sorted(passed)}"


def test_no_check_is_forgotten(passed: dict[str, str]) -> None:
    assert set(passed) == set(CHECKS)
