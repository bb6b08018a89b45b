# SPDX-License-Identifier: Apache-2.0
"""Recorded runs of the reasoning recipe: what is kept of a run's folder, and the tables made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reasoning import record, table
from tests.unit.benchmarks.recorded_rows import cells, recorder

ELSEWHERE = ["--hardware", "a GPU", "--versions", "verl=1", "torch=3", "--commit", "c" * 40, "--driver", "7"]


def logged(rate: float, **metrics: float) -> dict[str, float]:
    """What a validation logs, of two families."""
    made = {"pass_rate": rate, "stderr": 0.03, "num_prompts": 8.0, "num_generations": 16.0}
    for family, off in (("sums", 0.1), ("legs", -0.1)):
        made |= {f"reasoning_gym/{family}/pass_rate": rate + off, f"reasoning_gym/{family}/stderr": 0.05}
    made = {f"scalerl/validation/{name}": value for name, value in made.items()}
    return made | {"scalerl/compute/gpu_hours": rate, "scalerl/compute/generated_tokens": 100 * rate, **metrics}


def write_run(folder: Path, seed: int, last: int = 4) -> Path:
    """A run that is validated at steps 0, 2 and 4, up to its last."""
    peak = {"actor/perf/max_memory_allocated_gb": 3.0}
    steps: list[dict[str, Any]] = [logged(0.25), {}, logged(0.5, **peak), {}, logged(0.75, **peak)]
    folder.mkdir(parents=True)
    lines = [json.dumps({"step": step, "data": data}) for step, data in enumerate(steps[: last + 1])]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    settings = {"recipe": "r", "config": "config", "preset": [], "seed": seed, "steps": None, "overrides": []}
    (folder / "settings.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Of a finished run of seed 0, and of one of seed 1 that ended early."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(record, "append_rows", lambda bench, new: made.extend(new))
    runs = [str(write_run(tmp_path / str(seed), seed, last)) for seed, last in ((0, 4), (1, 3))]
    assert record.main([*runs, "--steps", "4", *ELSEWHERE, "--note", "shared"]) == 0
    return made


def test_each_validation_is_a_row_with_the_facts_that_were_given(rows: list[dict[str, Any]]) -> None:
    assert [(row["case"]["seed"], row["case"]["step"]) for row in rows] == [(0, 0), (0, 2), (0, 4), (1, 0), (1, 2)]
    first = rows[0]
    assert first["hardware"] == "a GPU" and first["versions"] == {"verl": "1", "torch": "3"} and first["driver"] == "7"
    assert first["commit"] == "c" * 40 and first["num_devices"] == 1
    assert (first["pass_rate"], first["stderr"], first["peak_gib"]) == (0.25, 0.03, None)
    assert first["families"] == {"legs": [0.15, 0.05], "sums": [0.35, 0.05]}
    assert [row["note"] for row in (rows[0], rows[-1])] == ["shared", "shared; ended after step 3 of 4"]
    assert first["run_id"] == rows[2]["run_id"] != rows[3]["run_id"]


def test_table_has_the_ends_of_each_run_and_its_newest_record(
    rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = [{**row, "pass_rate": 0.9} for row in rows if row["case"]["seed"] == 0]
    tuned = [{**row, "case": {**row["case"], "config": "grpo", "overrides": ["lr=1"]}} for row in rows[:3]]
    recorder(monkeypatch, table)([*old, *rows, *tuned])
    text = table.runs_table()
    # .03 x sqrt(2) = .042
    line = ["0.250 ± 0.030", "0.750 ± 0.030", "+0.500 ± 0.042", "4", "45.0", "3.0", "shared"]
    assert cells(text, "ScaleRL | 0")[2:] == line
    assert cells(text, "GRPO, lr=1 | 0")[2:] == line
    assert cells(text, "ScaleRL | 1")[3:6] == ["0.500 ± 0.030", "+0.250 ± 0.042", "2"]
    families = table.families_table()
    assert "| `legs` | `sums` |" in families
    assert cells(families, "ScaleRL | 0")[2:] == ["0.150 ± 0.050 to 0.650 ± 0.050", "0.350 ± 0.050 to 0.850 ± 0.050"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hardware", "a GPU"], "--versions and --commit"),
        (["--versions", "verl"], "PACKAGE=VERSION"),
    ],
)
def test_half_told_machines_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert record.main([str(write_run(tmp_path / "run", 0)), "--steps", "4", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_run_without_a_validation_of_ours_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", 0)
    (run / "metrics.jsonl").write_text('{"step": 1, "data": {"val-core/acc": 0.5}}\n')
    assert record.main([str(run), "--steps", "4", *ELSEWHERE]) == 1
    assert "scalerl/validation/pass_rate" in capsys.readouterr().err


def test_speed_leaves_out_the_first_two_steps() -> None:
    def step(seconds: float, tokens: float) -> dict[str, float]:
        return {"timing_s/step": seconds, "scalerl/compute/generated_tokens": tokens}

    first = [{}, step(90.0, 100), step(80.0, 200)]
    assert record.speed_of(first) == {}
    found = record.speed_of([*first, step(5.0, 300), step(4.0, 400), step(6.0, 700)])
    assert (found["step_s_p20"], found["step_s_p50"], found["step_s_p80"]) == (4.0, 5.0, 6.0)
    assert found["tokens_per_s"] == (700 - 300) / (4.0 + 6.0)


def test_lines_of_one_step_are_taken_together(tmp_path: Path) -> None:
    lines = [{"step": 2, "data": {"timing_s/step": 5.0}}, {"step": 2, "data": logged(0.5)}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    case = {"impl": "trl", "config": "trl", "preset": [], "seed": 0, "overrides": []}
    (tmp_path / "settings.json").write_text(json.dumps(case))
    (row,) = record.rows_of(tmp_path, {}, 2)
    assert (row["impl"], row["pass_rate"], row["step_s"]) == ("trl", 0.5, 5.0)


def test_runs_are_named_by_their_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["actor_rollout_ref.actor.optim.lr=3e-5", "trainer.save_freq=-1", "data.train_batch_size=8"]
    row = {"case": {"config": "trl", "preset": [], "overrides": overrides, "seed": 1, "step": 0}}
    monkeypatch.setattr(table, "read_rows", lambda bench: [row])
    assert list(table.read_runs()) == [("TRL's GRPO, learning rate 3e-5, data.train_batch_size=8", 1)]
