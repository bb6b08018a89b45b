# SPDX-License-Identifier: Apache-2.0
"""Files of synthetic runs in every format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scalerl_verl.scaling import sigmoid

Metrics = dict[int, dict[str, float]]


def make_metrics(num_steps: int = 40, every: int = 2, A: float = 0.645, seed: int = 0, first: int = 0) -> Metrics:
    """What a run with the ledger logs: compute at every step, a validation at step 0 and every `every` steps."""
    rng = np.random.default_rng(seed)
    metrics: Metrics = {}
    for step in range(first, num_steps + 1):
        hours = 0.5 + 1.0 * step
        metrics[step] = {"scalerl/compute/gpu_hours": hours, "scalerl/compute/generated_tokens": 1000.0 * step}
        if step:
            metrics[step]["scalerl/data/generated_tokens_sum"] = 1000.0
        if step % every == 0:
            noise = rng.normal(0, 0.002) if step else 0.0
            score = float(sigmoid(hours if step else 0.0, A, 1.7, 8.0, 0.3)) + noise
            metrics[step] |= {
                "scalerl/validation/pass_rate": score,
                "scalerl/validation/stderr": 0.01,
                "val-core/task/acc/mean@4": score,
            }
    return metrics


def write_jsonl(path: Path, metrics: Metrics) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in metrics.items()))
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run's folder with verl's JSONL log."""
    write_jsonl(tmp_path / "good" / "metrics.jsonl", make_metrics())
    return tmp_path / "good"


@pytest.fixture
def write_csv(tmp_path: Path) -> Callable[..., Path]:
    """`write_csv(name, A=..., last=..., noise=..., stderr=...)`: the curve of B 1.7, C_mid 8000, R0 .3."""

    def write(name: str, A: float = 0.645, last: float = 50000.0, noise: float = 0.005, stderr: bool = False) -> Path:
        compute = np.linspace(1500, 50000, 198)
        score = sigmoid(compute, A, 1.7, 8000.0, 0.3) + np.random.default_rng(0).normal(0, 1, 198) * noise
        lines = ["compute,score" + (",stderr" if stderr else "")]
        for c, s in zip(compute, score, strict=True):
            if c <= last:
                lines.append(f"{c:.3f},{s:.6f}" + (",0.005" if stderr else ""))
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write
