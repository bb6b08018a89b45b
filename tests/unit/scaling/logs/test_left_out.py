# SPDX-License-Identifier: Apache-2.0
"""The order of rows does not matter, every point that is left out is said, and NaN has one answer in all formats."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from scalerl_verl.scaling.logs.event_files import count_records
from scalerl_verl.scaling.logs.reading import read_run, read_runs
from scalerl_verl.scaling.logs.segments import ReadError
from scalerl_verl.scaling.logs.selection import Curve, choose_curve
from tests.unit.scaling.logs.conftest import make_metrics, write_jsonl
from tests.unit.scaling.logs.test_reading import resumed, write_tensorboard

SCORE = "val-core/task/acc/mean@4"
ROWS = [(step, round(0.3 + step / 400, 4)) for step in range(10, 101, 10)]


def orders() -> list[Callable[[list[str]], list[str]]]:
    def shuffled(rows: list[str]) -> list[str]:
        return random.Random(3).sample(rows, len(rows))

    return [lambda rows: rows, lambda rows: rows[::-1], shuffled, sorted]


def read(path: Path, x: str | None = "steps") -> Curve:
    return choose_curve(read_run([path]), x=x)


@pytest.mark.parametrize("order", orders(), ids=["as it is", "descending", "shuffled", "as text"])
@pytest.mark.parametrize("kind", ["csv", "verl", "flat"])
def test_order_of_rows_does_not_matter(kind: str, order: Callable[[list[str]], list[str]], tmp_path: Path) -> None:
    path = tmp_path / ("a.csv" if kind == "csv" else "a.jsonl")
    if kind == "csv":
        lines = [f"step,{SCORE}", *order([f"{step},{score}" for step, score in ROWS])]
    elif kind == "verl":
        lines = order([json.dumps({"step": step, "data": {SCORE: score}}) for step, score in ROWS])
    else:
        lines = order([json.dumps({"step": step, SCORE: score}) for step, score in ROWS])
    path.write_text("\n".join(lines) + "\n")
    (run,) = read_runs(path)
    curve = choose_curve(run, x="steps")
    assert list(zip(curve.steps, curve.score, strict=True)) == ROWS and curve.notes == ()


def test_thousands_in_a_column_of_steps(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f'step,{SCORE}\n"900",0.4\n"1,000",0.5\n"1,100",0.6\n')
    curve = read(path)
    assert curve.steps == (900, 1000, 1100) and curve.notes == ()
    path.write_text(f"step;{SCORE}\n900;0.4\n1,000;0.5\n")
    with pytest.raises(ReadError, match=r"line 3, column step: '1,000'"):
        read(path)


@pytest.mark.parametrize("cell", ["ten", "10.5"])
def test_step_that_is_none_is_refused_with_its_line(cell: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"step,{SCORE}\n5,0.4\n{cell},0.5\n")
    with pytest.raises(ReadError, match=rf"line 3, column step: '{cell}'"):
        read(path)


@pytest.mark.parametrize(("step", "reason"), [("-1", "negative"), ("Infinity", "infinite"), ("NaN", "no step")])
@pytest.mark.parametrize("kind", ["csv", "verl", "flat"])
def test_row_without_a_step_is_left_out_and_said(kind: str, step: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / ("a.csv" if kind == "csv" else "a.jsonl")
    if kind == "csv":
        lines = [f"step,{SCORE}", *(f"{s},{v}" for s, v in ROWS), f"{step},0.5"]
    elif kind == "verl":
        lines = [f'{{"step": {s}, "data": {{"{SCORE}": {v}}}}}' for s, v in [*ROWS, (step, 0.5)]]
    else:
        lines = [f'{{"step": {s}, "{SCORE}": {v}}}' for s, v in [*ROWS, (step, 0.5)]]
    path.write_text("\n".join(lines))
    curve = read(path)
    assert len(curve.steps) == len(ROWS)
    assert len(curve.notes) == 1 and "1 row left out" in curve.notes[0] and reason in curve.notes[0]
    assert f"line {len(lines)}" in curve.notes[0]


def test_step_with_two_values_is_refused_where_rows_have_no_order(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"step,{SCORE},time\n10,0.3,1\n20,0.4,2\n10,0.3,3\n20,0.2,4\n")
    with pytest.raises(ReadError, match=r"two values of .* at step 20, 0.4 and 0.2 \(line 3 and line 5\)"):
        read(path)
    path.write_text(f"step,{SCORE},time\n10,0.3,1\n20,0.4,2\n10,0.3,3\n20,,4\n")
    assert read(path).score == (0.3, 0.4), "the same value twice, and two times of day, contradict nothing"


def test_later_of_two_values_at_a_step_of_a_log_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [(0, 0.1), (10, 0.3), (20, 0.4), (20, 0.5), (30, 0.6)]
    path.write_text("\n".join(json.dumps({"step": s, "data": {SCORE: v}}) for s, v in rows))
    curve = read(path)
    assert curve.score == (0.3, 0.5, 0.6)
    assert len(curve.notes) == 1 and f"1 value of {SCORE} left out: a later one" in curve.notes[0], curve.notes
    assert "step 20" in curve.notes[0]


def test_rows_of_one_step_that_differ_in_their_time_alone_leave_nothing_out(tmp_path: Path) -> None:
    lines = [{"step": s, "time": s, "loss": 1.0} for s, _ in ROWS] + [
        {"step": s, "time": s + 1, SCORE: v} for s, v in ROWS
    ]
    (tmp_path / "a.jsonl").write_text(
        "\n".join(map(json.dumps, sorted(lines, key=lambda row: (row["step"], row["time"]))))
    )
    (run,) = read_runs(tmp_path / "a.jsonl")
    curve = choose_curve(run, x="steps")
    assert list(zip(curve.steps, curve.score, strict=True)) == ROWS and curve.notes == ()


def test_tag_that_is_written_twice_at_a_step_is_said(tmp_path: Path) -> None:
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path))
    for step, value in [*ROWS, (100, 0.9)]:
        writer.add_scalar(SCORE, value, step)
    writer.close()
    curve = read(tmp_path)
    assert curve.score[-1] == pytest.approx(0.9) and len(curve.notes) == 1 and "1 value of" in curve.notes[0]


def test_steps_that_a_resumed_run_repeats_are_said(tmp_path: Path) -> None:
    first, second, _ = resumed(tmp_path)
    path = write_jsonl(tmp_path / "a.jsonl", first)
    path.write_text(path.read_text() + write_jsonl(tmp_path / "b", second).read_text())
    (note,) = read_runs(path)[0].notes
    assert "4 steps left out (22 to 25): a later attempt began at step 21" in note


def test_attempts_count_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    attempts = [{s: 0.1 for s in range(0, 50)}, {s: 0.2 for s in range(40, 60)}, {s: 0.3 for s in range(30, 55)}]
    lines = [json.dumps({"step": s, "data": {SCORE: v}}) for attempt in attempts for s, v in attempt.items()]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    curve = read(tmp_path / "a.jsonl")
    assert curve.steps[-1] == 54 and set(curve.score[30:]) == {0.3}


def write_nan(kind: str, folder: Path, nan: str) -> Path:
    """Scores of `ROWS`, of which the last two are NaN in the way of the format."""
    rows = [(s, v if s < 90 else nan) for s, v in ROWS]
    path = folder / "a.csv"
    if kind == "wandb":
        path.write_text("\n".join([f'"Step","r - {SCORE}"', *(f'"{s}","{v}"' for s, v in rows)]))
    elif kind == "csv":
        path.write_text("\n".join([f"step,{SCORE}", *(f"{s},{v}" for s, v in rows)]))
    elif kind == "plain":
        path.write_text("\n".join(["compute,score", *(f"{s},{v}" for s, v in rows)]))
    elif kind == "mlflow":
        (folder / "run" / "metrics").mkdir(parents=True)
        (folder / "run" / "meta.yaml").write_text("run_name: r\n")
        (folder / "run" / "metrics" / "score").write_text("\n".join(f"{s} {v} {s}" for s, v in rows))
        return folder / "run"
    elif kind == "tensorboard":
        write_tensorboard(folder / "tb", {s: {SCORE: float(v)} for s, v in rows})
        return folder / "tb"
    elif kind == "parquet":
        path = folder / "a.parquet"
        values = [float(v) if v else None for _, v in rows]
        pytest.importorskip("pandas").DataFrame({"step": [s for s, _ in rows], SCORE: values}).to_parquet(path)
    else:
        path = folder / "a.jsonl"
        data = {"verl": '{{"step": {}, "data": {{"{}": {}}}}}', "flat": '{{"step": {}, "{}": {}}}'}[kind]
        path.write_text("\n".join(data.format(s, SCORE, v) for s, v in rows))
    return path


@pytest.mark.parametrize(
    ("kind", "nan"),
    [
        ("verl", "null"), ("verl", "NaN"), ("verl", '"NaN"'), ("flat", "null"), ("flat", "NaN"),
        ("csv", "NaN"), ("csv", ""), ("csv", "null"), ("wandb", "NaN"), ("wandb", ""), ("plain", "nan"), ("plain", ""),
        ("mlflow", "nan"), ("tensorboard", "nan"), ("parquet", "nan"), ("parquet", ""),
    ],
)  # fmt: skip
def test_point_without_a_score_is_left_out_and_said_in_every_format(kind: str, nan: str, tmp_path: Path) -> None:
    curve = read(write_nan(kind, tmp_path, nan), x=None)
    assert curve.score == pytest.approx([v for s, v in ROWS if s < 90])
    assert len(curve.notes) == 1 and "2 points left out" in curve.notes[0], curve.notes
    assert "is NaN, null or empty" in curve.notes[0]


def test_metric_that_is_logged_at_some_steps_only_lacks_nothing(tmp_path: Path) -> None:
    lines = [f"step,loss,{SCORE}", *(f"{s},1.0,{0.5 if s % 10 == 0 else ''}" for s in range(1, 41))]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    curve = read(tmp_path / "a.csv")
    assert curve.steps == (10, 20, 30, 40) and curve.notes == ()


def test_score_that_is_never_a_number_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(f'{{"step": {s}, "data": {{"{SCORE}": null}}}}' for s in range(9)))
    with pytest.raises(ReadError, match=f"every value of {SCORE} is NaN"):
        read(tmp_path / "a.jsonl")


def test_compute_that_is_nan_leaves_its_point_out(tmp_path: Path) -> None:
    metrics = make_metrics(20)
    metrics[10]["scalerl/compute/gpu_hours"] = math.nan
    curve = choose_curve(read_run([write_jsonl(tmp_path / "a.jsonl", metrics)]))
    assert curve.x_name == "gpu_hours" and 10 not in curve.steps and len(curve.steps) == 9
    assert [note for note in curve.notes if "1 point left out" in note and "step 10" in note]


def test_text_among_scores_is_refused_only_where_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"step,loss,{SCORE}\n1,0.5,0.1\n2,oops,0.2\n")
    assert read(tmp_path / "a.csv").score == (0.1, 0.2)
    with pytest.raises(ReadError, match="line 3, column loss: 'oops' is no number"):
        choose_curve(read_run([tmp_path / "a.csv"]), y="loss")


def test_lines_of_json_end_at_a_newline_only(tmp_path: Path) -> None:
    marks = "\u2028 \u2029 \x85 \x0b \x0c \x1c"
    rows = [{"step": s, "data": {SCORE: v, "sample": f"text{marks}more"}} for s, v in ROWS]
    path = tmp_path / "a.jsonl"
    path.write_bytes("\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode())
    curve = read(path)
    assert curve.steps == tuple(s for s, _ in ROWS) and curve.notes == ()


def test_line_that_was_cut_off_is_said(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "m.jsonl", make_metrics(6))
    path.write_text(path.read_text()[:-20])
    (note,) = read_runs(path)[0].notes
    assert "its line was cut off (line 7)" in note


def test_damaged_event_file_says_how_much_cannot_be_read(tmp_path: Path) -> None:
    write_tensorboard(tmp_path, {s: {SCORE: v} for s, v in ROWS})
    (path,) = tmp_path.glob("events.*")
    num_records, is_cut = count_records(path)
    assert not read_runs(tmp_path)[0].notes and not is_cut and num_records >= len(ROWS)
    data = bytearray(path.read_bytes())
    whole = bytes(data)
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    (run,) = read_runs(tmp_path)
    assert len(run.steps) < len(ROWS) and any("the file is damaged" in note for note in run.notes), run.notes
    path.write_bytes(whole[:-5])
    assert any("cut off" in note for note in read_runs(tmp_path)[0].notes)


def notes_of(folder: Path) -> list[str]:
    """Of all runs of a folder, which are the same whether or not its runs are joined."""
    said = [note for run in read_runs(folder) for note in run.notes]
    assert said == list(read_run([folder]).notes)
    return said


def test_logs_of_other_kinds_in_a_folder_are_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", {step: {SCORE: value} for step, value in ROWS})
    assert notes_of(tmp_path) == []
    (tmp_path / "b.csv").write_text(f"step,{SCORE}\n1,0.5\n2,0.6\n")
    write_tensorboard(tmp_path / "tb", {step: {SCORE: value} for step, value in ROWS})
    (events,) = (tmp_path / "tb").iterdir()
    said = notes_of(tmp_path)
    assert len(said) == 2 and all("1 file left out" in note and "JSON Lines counts" in note for note in said)
    assert f"(tb/{events.name})" in said[0] and "(b.csv)" in said[1]


def test_files_that_are_no_log_or_an_older_one_are_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "metrics.jsonl", make_metrics(4))
    (tmp_path / "problems.jsonl").write_text('{"prompt": "1 + 1"}\n')
    (tmp_path / "scalerl_compute.jsonl").write_text('{"step": 1, "gpu_hours": 2.0}\n')
    (note,) = notes_of(tmp_path)
    assert "1 file left out (problems.jsonl)" in note
    write_jsonl(tmp_path / "scalerl_steps.jsonl", make_metrics(6))
    said = notes_of(tmp_path)
    assert len(said) == 2 and "(metrics.jsonl): scalerl_steps.jsonl has every step" in said[0]


def test_log_without_metrics_beside_others_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", {step: {SCORE: value} for step, value in ROWS})
    write_jsonl(tmp_path / "b.jsonl", {-1: {SCORE: 0.5}})
    (run,) = read_runs(tmp_path)
    assert len(run.notes) == 1 and "b.jsonl: 1 row left out: its step is negative" in run.notes[0]
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path / "tb" / "texts"))
    writer.add_text("note", "text", 1)
    writer.close()
    write_tensorboard(tmp_path / "tb" / "run", {step: {SCORE: value} for step, value in ROWS})
    (run,) = read_runs(tmp_path / "tb")
    assert len(run.notes) == 1 and "it has no metrics" in run.notes[0] and "texts" in run.notes[0]


def test_text_in_place_of_a_score_is_refused_with_its_line_in_a_log_too(tmp_path: Path) -> None:
    rows = [(step, value if step != 30 else "oops") for step, value in ROWS]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"step": s, "data": {SCORE: v, "note": "text"}}) for s, v in rows))
    with pytest.raises(ReadError, match=r"line 3: .*'oops' is no number"):
        read(path)
