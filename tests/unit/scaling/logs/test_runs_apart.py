# SPDX-License-Identifier: Apache-2.0
"""Several runs in one place are told apart, and attempts at one run are joined: never the one for the other."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from scalerl_verl.cli import main
from scalerl_verl.scaling.logs.reading import read_run, read_runs
from scalerl_verl.scaling.logs.segments import ReadError, RunLog
from scalerl_verl.scaling.logs.selection import choose_curve
from tests.unit.scaling.logs.conftest import Metrics, make_metrics, write_jsonl
from tests.unit.scaling.logs.test_reading import resumed, write_tensorboard

SCORE = "val-core/task/acc/mean@4"
STEPS = range(10, 101, 10)
ONE = {step: 0.3 + step / 1000 for step in STEPS}
TWO = {step: 0.5 + step / 1000 for step in range(10, 61, 10)}


def write_rows(path: Path, header: list[str], rows: list[list[object]]) -> Path:
    with path.open("w", newline="") as stream:
        csv.writer(stream, quoting=csv.QUOTE_ALL).writerows([header, *rows])
    return path


def scores(run: RunLog) -> dict[int, float]:
    curve = choose_curve(run, x="steps", y=SCORE)
    return dict(zip(curve.steps, curve.score, strict=True))


def as_metrics(values: dict[int, float], other: bool = True) -> Metrics:
    return {step: {SCORE: value} | ({"loss": 1.0} if other else {}) for step, value in values.items()}


def check_two(runs: list[RunLog], names: list[str]) -> None:
    assert [run.name for run in runs] == names
    assert scores(runs[0]) == pytest.approx(ONE) and scores(runs[1]) == pytest.approx(TWO)


def test_experiments_in_verls_project_folder_are_runs_of_their_own(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "grpo.jsonl", as_metrics(ONE))
    write_jsonl(tmp_path / "q0.5b.jsonl", as_metrics(TWO))
    check_two(read_runs(tmp_path), ["grpo", "q0.5b"])


def test_experiment_that_goes_on_where_another_ends_is_not_joined_to_it(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", as_metrics(ONE))
    write_jsonl(tmp_path / "b.jsonl", as_metrics({110: 0.5, 120: 0.6}))
    assert [sorted(run.steps) for run in read_runs(tmp_path)] == [list(STEPS), [110, 120]]
    assert len(read_run([tmp_path]).steps) == 12, "on request"


def test_numbered_logs_of_earlier_attempts_belong_to_their_run(tmp_path: Path) -> None:
    first, second, expected = resumed(tmp_path)
    write_jsonl(tmp_path / "metrics.001.jsonl", {0: {"scalerl/validation/pass_rate": 0.9}})
    write_jsonl(tmp_path / "metrics.002.jsonl", first)
    write_jsonl(tmp_path / "metrics.jsonl", second)
    (run,) = read_runs(tmp_path)
    assert run.name == tmp_path.name and sorted(run.steps) == sorted(expected)
    assert run.steps[0]["scalerl/validation/pass_rate"] == first[0]["scalerl/validation/pass_rate"]
    (resumed_at_21,) = run.notes
    assert run.overruled == {"scalerl/validation/pass_rate": (0,)}
    assert "metrics.002.jsonl: 4 steps left out (22 to 25): a later attempt began at step 21" in resumed_at_21


def test_folders_of_tensorboard_are_runs_as_tensorboard_shows_them(tmp_path: Path) -> None:
    write_tensorboard(tmp_path / "exp" / "a", as_metrics(ONE))
    write_tensorboard(tmp_path / "exp" / "b", as_metrics(TWO))
    check_two(read_runs(tmp_path), ["exp/a", "exp/b"])


def test_hyperparameters_beside_a_tensorboard_run_are_no_run(tmp_path: Path) -> None:
    write_tensorboard(tmp_path, as_metrics(ONE))
    write_tensorboard(tmp_path / "1700000000.12", {0: {"hparam/lr": 1e-6}})
    (run,) = read_runs(tmp_path)
    assert scores(run) == pytest.approx(ONE)
    assert [note for note in run.notes if "1700000000.12 is left out" in note and "hparam/lr" in note]


def test_run_that_begins_anew_in_one_log_is_another_run(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "both.jsonl", as_metrics(ONE))
    path.write_text(path.read_text() + write_jsonl(tmp_path / "x", as_metrics(TWO)).read_text())
    runs = read_runs(path)
    check_two(runs, ["both#1", "both#2"])
    assert any("begins 2 times" in note for note in runs[0].notes)
    assert scores(read_run([path])) == pytest.approx(TWO), "the later one, on request"


@pytest.mark.parametrize("names", [("grpo", "scalerl"), ("qwen3-8b - grpo", "qwen3-8b - scalerl - k8"), ("a", "b - a")])
def test_runs_in_an_export_of_wandb_by_the_header(names: tuple[str, str], tmp_path: Path) -> None:
    header = ["Step", *(f"{name} - {SCORE}{end}" for name in names for end in ("", "__MIN", "__MAX"))]
    rows: list[list[object]] = [[step, *[ONE[step]] * 3, *[TWO.get(step, "")] * 3] for step in STEPS]
    runs = read_runs(write_rows(tmp_path / "export.csv", header, rows))
    check_two(runs, list(names))
    assert not runs[1].notes and not choose_curve(runs[1], y=SCORE).notes, "the rows of the longer run are not its own"


def test_single_run_of_an_export_has_its_own_name_as_several_have(tmp_path: Path) -> None:
    rows: list[list[object]] = [[step, value] for step, value in ONE.items()]
    path = write_rows(tmp_path / "export.csv", ["Step", f"qwen3-8b - scalerl - {SCORE}"], rows)
    (run,) = read_runs(path)
    assert run.name == "qwen3-8b - scalerl" and scores(run) == pytest.approx(ONE)
    assert read_runs(path, "mine")[0].name == "mine"


def test_axis_of_an_export_counts_before_the_steps_of_its_runs(tmp_path: Path) -> None:
    header = ["training/global_step", "r - _step", f"r - {SCORE}"]
    rows: list[list[object]] = [[step, 1000 + step, value] for step, value in ONE.items()]
    (run,) = read_runs(write_rows(tmp_path / "export.csv", header, rows))
    assert scores(run) == pytest.approx(ONE)


@pytest.mark.parametrize("column", ["run", "Run", "experiment_name"])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_runs_in_a_tidy_table_by_a_column(column: str, kind: str, tmp_path: Path) -> None:
    rows = [{column: name, "step": s, SCORE: v} for name, vs in (("grpo", ONE), ("k8", TWO)) for s, v in vs.items()]
    rows = rows[::2] + rows[1::2]
    path = tmp_path / f"tidy.{kind}"
    if kind == "csv":
        write_rows(path, list(rows[0]), [list(row.values()) for row in rows])
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pytest.importorskip("pandas").DataFrame(rows).to_parquet(path)
    check_two(read_runs(path), ["grpo", "k8"])
    with pytest.raises(ReadError, match=r"several runs \(grpo, k8\)"):
        read_run([path])


def test_plain_table_with_runs_and_seeds(tmp_path: Path) -> None:
    rows: list[list[object]] = [
        [name, seed, c, 0.1 * c + 0.01 * seed] for name in ("a", "b") for seed in (1, 2) for c in (1, 2, 3)
    ]
    runs = read_runs(write_rows(tmp_path / "tidy.csv", ["run", "seed", "compute", "score"], rows))
    assert [run.name for run in runs] == ["a seed 1", "a seed 2", "b seed 1", "b seed 2"]
    assert choose_curve(runs[1]).score == pytest.approx((0.12, 0.22, 0.32))


def test_column_of_one_run_tells_nothing_apart(tmp_path: Path) -> None:
    rows: list[list[object]] = [["a", 42, step, value] for step, value in ONE.items()]
    (run,) = read_runs(write_rows(tmp_path / "one.csv", ["run", "seed", "step", SCORE], rows))
    assert run.name == "one" and scores(run) == pytest.approx(ONE)


def test_names_that_are_given_begin_those_of_several_runs(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", as_metrics(ONE))
    assert [run.name for run in read_runs(tmp_path, "mine")] == ["mine"]
    write_jsonl(tmp_path / "b.jsonl", as_metrics(TWO))
    assert [run.name for run in read_runs(tmp_path, "mine")] == ["mine/a", "mine/b"]


def test_dump_of_validations_beside_several_runs_is_of_none_of_them(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_metrics(4))
    (tmp_path / "validation").mkdir()
    assert read_runs(tmp_path)[0].validation_folders
    write_jsonl(tmp_path / "b.jsonl", make_metrics(4))
    assert not any(run.validation_folders for run in read_runs(tmp_path))


def test_commands_give_each_run_of_a_place_a_curve_and_say_what_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "x", tmp_path / "y"]
    for folder in folders:
        write_jsonl(folder / "a.jsonl", make_metrics(40))
        write_jsonl(folder / "b.jsonl", make_metrics(40, A=0.5) | {-1: {SCORE: 0.1}})
    code = main(["fit", *map(str, folders), "--json"])
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    runs = found["runs"] if isinstance(found, dict) else found
    assert code == 0
    assert [run["run"] for run in runs] == [f"{folder}/{name}" for folder in folders for name in "ab"]
    assert [round(run["A"], 1) for run in runs] == [0.6, 0.5, 0.6, 0.5]
    assert captured.err.count("1 row left out: its step is negative") == 2


def test_names_of_runs_and_groups_do_not_depend_on_the_order_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write_jsonl(tmp_path / name / "seed1.jsonl", make_metrics(40, seed=i)) for i, name in enumerate("xyz")]
    by_path = str(tmp_path / "(.)")
    found = []
    for order in (paths, paths[::-1]):
        assert main(["fit", *map(str, order), "--group-by", by_path, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        groups = {group["group"]: group["members"] for group in answer["groups"]}
        found.append(({run["run"]: run["A"] for run in answer["runs"]}, groups))
    assert found[0] == found[1] and set(found[0][1]) == set("xyz")
    assert set(found[0][0]) == set(map(str, paths))


def test_file_that_two_paths_hold_is_no_second_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(run_dir), str(run_dir / "metrics.jsonl")]) == 1
    assert "given twice" in capsys.readouterr().err


def test_one_log_of_a_folder_that_cannot_be_read_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "good.jsonl", make_metrics(40))
    bad = write_jsonl(tmp_path / "bad.jsonl", make_metrics(4))
    bad.write_text(bad.read_text() + "no json\n{}\n")
    assert main(["fit", str(tmp_path), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert [run["run"] for run in answer["runs"]] == ["good"]
    (refusal,) = answer["refused"]
    assert refusal["run"] == str(bad) and "line 6 is no JSON" in refusal["reason"]
