# SPDX-License-Identifier: Apache-2.0
"""Formats beyond verl's own: flat rows, a Hugging Face trainer's state, MLflow's file store, SwanLab's tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scalerl_verl.scaling.logs.reading import read_run, read_runs
from scalerl_verl.scaling.logs.segments import ReadError
from scalerl_verl.scaling.logs.selection import choose_curve

ROWS = [(step, round(0.3 + step / 400, 4)) for step in range(10, 101, 10)]


def test_flat_rows_of_json(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [{"step": s, "gpu_hours": s / 10, "accuracy": v, "note": "ok", "lr": 1e-6} for s, v in ROWS]
    path.write_text("\n".join(map(json.dumps, lines)))
    for given in (path, tmp_path):
        curve = choose_curve(read_run([given]), y="accuracy")
        assert curve.x_name == "gpu_hours" and list(zip(curve.steps, curve.score, strict=True)) == ROWS
    path.write_text("\n".join(json.dumps({"compute": s, "score": v}) for s, v in ROWS))
    curve = choose_curve(read_run([path]))
    assert curve.compute == tuple(float(s) for s, _ in ROWS) and curve.score == tuple(v for _, v in ROWS)


def test_column_score_of_a_table_of_steps_is_the_score(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,score,loss\n1,0.5,3\n2,0.6,2\n")
    assert choose_curve(read_run([tmp_path / "a.csv"])).y_name == "score"


def write_state(path: Path, last: int) -> Path:
    history: list[dict[str, object]] = []
    for step in range(1, last + 1):
        history.append({"epoch": step / 50, "step": step, "loss": 2.0, "num_input_tokens_seen": 1000 * step})
        if step % 10 == 0:
            history.append({"epoch": step / 50, "step": step, "eval_accuracy": 0.3 + step / 400, "eval_runtime": 9.0})
    history.append({"epoch": 2.0, "step": last, "train_runtime": 99.0, "train_loss": 1.0})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"best_metric": None, "global_step": last, "log_history": history}, indent=2))
    return path


def test_state_of_a_hugging_face_trainer(tmp_path: Path) -> None:
    path = write_state(tmp_path / "out" / "trainer_state.json", 100)
    run = read_run([path])
    assert run.name == "out"
    curve = choose_curve(run, x="num_input_tokens_seen", y="eval_accuracy")
    assert curve.steps == tuple(s for s, _ in ROWS) and curve.score == pytest.approx([v for _, v in ROWS])
    assert curve.compute == tuple(1000.0 * s for s, _ in ROWS) and curve.notes == ()
    with pytest.raises(ReadError, match="It has eval_accuracy"):
        choose_curve(run)


def test_state_of_the_last_checkpoint_holds_those_before_it(tmp_path: Path) -> None:
    for step in (50, 90, 100):
        write_state(tmp_path / f"checkpoint-{step}" / "trainer_state.json", step)
    (run,) = read_runs(tmp_path)
    assert run.name == tmp_path.name and max(run.steps) == 100
    write_state(tmp_path / "trainer_state.json", 120)
    assert max(read_runs(tmp_path)[0].steps) == 120, "that of the end of the run"


def write_mlflow(
    store: Path, experiment: str, run: str, name: str, rows: list[tuple[int, float]], **facts: str
) -> Path:
    folder = store / experiment / run
    (store / experiment).mkdir(parents=True, exist_ok=True)
    (store / experiment / "meta.yaml").write_text(f"experiment_id: '{experiment}'\nname: math\n")
    metrics = {"val-core/math/acc/mean_at_4": rows, "loss": [(s, 1.0) for s, _ in rows]}
    for metric, values in metrics.items():
        path = folder / "metrics" / metric
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{1700000000000 + s} {v} {s}\n" for s, v in values))
    system = folder / "metrics" / "system" / "gpu"
    system.parent.mkdir(parents=True, exist_ok=True)
    system.write_text("1700000000000 5.0 0\n1700000009999 6.0 0\n")
    lines = {"run_name": name, "run_id": run, "lifecycle_stage": "active", **facts}
    (folder / "meta.yaml").write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    return folder


def test_runs_of_mlflow_have_their_names(tmp_path: Path) -> None:
    store = tmp_path / "mlruns"
    one = write_mlflow(store, "123", "abc", "scalerl", ROWS)
    write_mlflow(store, "123", "def", "'grpo - 2'", ROWS[:6])
    write_mlflow(store, "123", "ghi", "gone", ROWS, lifecycle_stage="deleted")
    (store / ".trash" / "9").mkdir(parents=True)
    for given in (tmp_path, store, store / "123"):
        runs = read_runs(given)
        assert [run.name for run in runs] == ["scalerl", "grpo - 2"]
        assert [len(choose_curve(run).steps) for run in runs] == [10, 6]
    (run,) = read_runs(one)
    curve = choose_curve(run)
    assert curve.y_name == "val-core/math/acc/mean_at_4", "as verl writes it there"
    assert list(zip(curve.steps, curve.score, strict=True)) == ROWS and curve.notes == ()


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for run in ("abc", "def"):
        write_mlflow(tmp_path, "1", run, "scalerl", ROWS)
    assert [run.name for run in read_runs(tmp_path)] == ["scalerl (abc)", "scalerl (def)"]


def test_resumed_run_of_mlflow_is_joined_by_time(tmp_path: Path) -> None:
    folder = write_mlflow(tmp_path, "1", "abc", "scalerl", ROWS)
    path = folder / "metrics" / "val-core" / "math" / "acc" / "mean_at_4"
    path.write_text(path.read_text() + "1800000000000 0.9 90\n")
    curve = choose_curve(read_run([folder]))
    assert curve.steps[-1] == 90 and curve.score[-1] == 0.9
    assert any("1 step" in note or "2 steps" in note for note in curve.notes)


def test_line_that_is_none_of_mlflow_is_refused(tmp_path: Path) -> None:
    folder = write_mlflow(tmp_path, "1", "abc", "scalerl", ROWS)
    (folder / "metrics" / "loss").write_text("1700000000000 0.5 1\nhello\n")
    with pytest.raises(ReadError, match="loss line 2 is no line of MLflow"):
        read_run([folder])


def test_table_of_swanlab_has_times_beside_its_metrics(tmp_path: Path) -> None:
    """As `swanlab.Api` returns it, written by `to_csv`."""
    name = "val-core/math/acc/mean@4"
    lines = [f"step,{name},{name}_timestamp,loss,loss_timestamp"]
    lines += [f"{s},{v},{1751712864000 + s},1.0,{1751712864000 + s}" for s, v in ROWS]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    run = read_run([tmp_path / "a.csv"])
    assert run.names() == ["loss", name]
    assert list(zip(choose_curve(run).steps, choose_curve(run).score, strict=True)) == ROWS


@pytest.mark.parametrize("name", ["step", "_step", "global_step"])
def test_steps_may_be_asked_for_as_a_tracker_calls_them(tmp_path: Path, name: str) -> None:
    """As W&B's API returns a history: its numbers of steps are no metric, and parts of other names look like them."""
    path = tmp_path / "history.jsonl"
    rows = [{"_step": step, "acc": 0.5, "time_per_step": 2.0, "training/global_step": step} for step in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = choose_curve(read_run([path]), x=name, y="acc")
    assert curve.x_name == "steps" and curve.compute == (1.0, 2.0)
