# SPDX-License-Identifier: Apache-2.0
"""The step benchmark: alike but for the algorithm, and its table has the newest run of each way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rows as recorded
from benchmarks.launching import Step
from benchmarks.step.bench import rows_of
from benchmarks.step.runs import GRPO, LOADS, RECIPE, WAYS, overrides
from benchmarks.step.table import short_table, step_table

FACTS = {"hardware": "a card", "versions": {"vllm": "0.24.0"}, "commit": "c" * 40, "command": "c"}


def made(way: str, seconds: float, size: str = "2B") -> list[dict[str, Any]]:
    steps = [
        Step(number, number * seconds, (number + 1) * seconds, {"timing_s/gen": 1.5 * seconds}) for number in range(3)
    ]
    return rows_of(way, LOADS[size], steps, {"planned_trainer_gib": 41.1}, FACTS)


def test_table_has_the_newest_run_of_each_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)
    rows = [*made(GRPO, 7.0), *made(GRPO, 100.0), *made(RECIPE, 80.0), *made(RECIPE, 1.0, size="cpu")]
    (tmp_path / "step.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    lines = step_table().splitlines()[2:4]
    assert lines[0] == "| verl grpo | 100.0 | 1.00 | 150.0 |  |  |  | 41.1 | 3 |"
    assert lines[1] == "| recipe | 80.0 | 0.80 | 120.0 |  |  |  | 41.1 | 3 |"
    assert short_table().splitlines()[3] == "| recipe | 80.0 | 0.80 |  | 41.1 |"


def test_bench_that_never_ran_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match=r"benchmarks\.step\.bench"):
        step_table()


def test_ways_differ_in_the_algorithm_alone(tmp_path: Path) -> None:
    lines = {way: set(overrides(way, LOADS["2B"], tmp_path, tmp_path, 3, on_gpu=True)) for way in WAYS}
    for way, found in lines.items():
        names = {line.lstrip("+").split("=")[0] for line in found ^ lines[GRPO]}
        ours = {"scalerl", "algorithm.adv_estimator", "actor_rollout_ref.actor.ppo_mini_batch_size"}
        others = {name for name in names - ours if not name.startswith(("algorithm.scalerl.", "actor_rollout_ref."))}
        assert others == set(), way
