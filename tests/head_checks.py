# SPDX-License-Identifier: Apache-2.0
"""What a run of `tests.head_engine` must have found, on any device and vLLM; shared by the CPU and GPU tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
EXACT = 1e-4
"""Largest error of a log-prob of an FP32 head: FP32 sums are off by 1e-6 to 1e-5 here, bf16 logits by 1e-2."""


def run_engines(folder: Path, *cases: str, **env: str) -> dict[str, dict[str, Any]]:
    """Case -> what `tests.head_engine` found, all of them in one process."""
    environment = {
        **os.environ,
        "SCALERL_VERL_ACTIVE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH", "")])),
        **env,
    }
    command = [sys.executable, "-m", "tests.head_engine", str(folder), *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return {case: json.loads((folder / f"{case}.json").read_text()) for case in cases}


def check_case(found: dict[str, Any]) -> None:
    """The head is FP32 from bf16 weights, follows every change of them, and would not be without the name."""
    assert (found["dtype"], found["weight_dtype"], found["dtype_without"]) == ("float32", "bfloat16", "bfloat16")
    assert found["mean_logp"] < -0.3, "sampled tokens are certain: their log-probs would be right with any head"
    assert found["padded_columns"] > 0
    errors = {name: value for name, value in found.items() if name.startswith("error") and name != "error_without"}
    assert {"error", "error_at_temperature", "error_top_p", "error_after_update"} <= set(errors)
    assert {name: value for name, value in errors.items() if not value <= EXACT} == {}
    assert found["error_without"] > 10 * EXACT
    record = found["record"]
    assert (record["side"], record["dtype"], record["weight_dtype"]) == ("generator", "float32", "bfloat16")
    assert 0 < record["relative_error"] < 2e-5
