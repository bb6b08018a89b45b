# SPDX-License-Identifier: Apache-2.0
"""CSV files as people and spreadsheets write them: read right, or refused with the line and what to change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scalerl_verl.scaling import FitRefused, report, sigmoid
from scalerl_verl.scaling.logs.reading import read_run
from scalerl_verl.scaling.logs.segments import ReadError
from scalerl_verl.scaling.logs.selection import choose_curve

ROWS = [(1000.0 * i, float(sigmoid(1000.0 * i, 0.645, 1.7, 8000.0, 0.3))) for i in range(1, 13)]


def write(path: Path, lines: list[str], encoding: str = "utf-8") -> Path:
    path.write_bytes("\n".join(lines).encode(encoding))
    return path


def plain(header: str = "compute,score", mark: str = ",") -> list[str]:
    return [header, *(f"{c!r}{mark}{s!r}" for c, s in ROWS)]


@pytest.mark.parametrize(
    "lines",
    [
        plain(),
        plain("compute;score", ";"),
        plain("compute\tscore", "\t"),
        plain(" compute , score "),
        plain("\ufeffcompute,score"),
        [line + "\r" for line in plain()],
        ["note,compute,score", *(f'"a, b",{c!r},{s!r}' for c, s in ROWS)],
        ["compute,score,note", *(f"{c!r},{s!r},first try" for c, s in ROWS)],
        [*plain(), "", " , "],
    ],
)
def test_tables_that_mean_the_same_give_the_same_curve(lines: list[str], tmp_path: Path) -> None:
    curve = choose_curve(read_run([write(tmp_path / "ünï 名.csv", lines)]))
    assert list(zip(curve.compute, curve.score, strict=True)) == ROWS and curve.name == "ünï 名"


@pytest.mark.parametrize(
    ("header", "x", "label"),
    [
        ("gpu_hours,score", None, "GPU-hours"),
        ("tokens,score", None, "generated tokens"),
        ("compute,score", None, "compute"),
        ("hours,score", "hours", "hours"),
    ],
)
def test_column_of_compute_may_be_named_by_its_unit(header: str, x: str | None, label: str, tmp_path: Path) -> None:
    curve = choose_curve(read_run([write(tmp_path / "a.csv", plain(header))]), x=x)
    assert curve.x_label == label and curve.compute == tuple(c for c, _ in ROWS)


def test_table_of_steps_is_fitted_over_its_hours_and_not_its_steps(tmp_path: Path) -> None:
    lines = ["step,gpu_hours,val-core/x/acc/mean@16", *(f"{i},{c},{s}" for i, (c, s) in enumerate(ROWS, 1))]
    run = read_run([write(tmp_path / "a.csv", lines)])
    assert choose_curve(run).compute == choose_curve(run, x="gpu_hours").compute == tuple(c for c, _ in ROWS)
    assert choose_curve(run, x="steps").compute == tuple(range(1, 13))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [*plain()[:4], "4000.5,oops", *plain()[4:]],
            r"line 5, column score: 'oops' is no number; correct it or leave",
        ),
        (["compute;score", "1500,0;0,3"], r"line 2, column compute: '1500,0' .* a point for the decimal comma"),
        (["compute,score,score", "1,.3,.4"], r"has 2 columns 'score': each needs a name of its own"),
        (plain()[1:], r"begins with numbers .*: its first line must name the columns"),
        (["score", ".3", ".4"], r"no column compute; it has score: choose compute with --x .*name them compute,score"),
        (["compute,score"], "a header and no rows"),
        (["compute,note,score", '1,"two\nlines",.3', "2,,oops"], "line 4, column score: 'oops'"),
        ([], "is empty"),
        ([*plain()[:3], "1,2,3"], "line 4 has 3 cells, the header has 2"),
    ],
)
def test_table_that_cannot_be_says_where_and_what_to_change(lines: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ReadError, match=message):
        choose_curve(read_run([write(tmp_path / "a.csv", lines)]))


@pytest.mark.parametrize(
    ("row", "places"),
    [("4000,0.5", "line 5, line 7"), ("-1,0.5", "line 7"), ("1e200,0.5", "line 7"), ("9e4,1.5", "line 7")],
)
def test_row_that_is_no_point_of_a_curve_is_named_by_its_line(row: str, places: str, tmp_path: Path) -> None:
    lines = [*plain()[:4], "4000,0.4", "", row, *plain()[6:]]
    with pytest.raises(FitRefused, match=rf"\({places}\)"):
        choose_curve(read_run([write(tmp_path / "a.csv", lines)])).points()


@pytest.mark.parametrize(
    ("name", "text"), [("a.json", "[]"), ("trainer_state.json", '{"log_history": []}'), ("a.jsonl", "")]
)
def test_json_without_rows_has_no_header(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ReadError, match=rf"{name} holds no rows"):
        choose_curve(read_run([write(tmp_path / name, [text])]))


@pytest.mark.parametrize("x", [None, "gpu_hours"])
def test_export_over_a_metric_has_its_columns_found_as_a_log_has(x: str | None, tmp_path: Path) -> None:
    names = ("scalerl/compute/gpu_hours", "run - scalerl/validation/pass_rate", "run - scalerl/validation/stderr")
    lines = [",".join(f'"{name}"' for name in names), *(f"{c},{s},0.01" for c, s in ROWS)]
    curve = choose_curve(read_run([write(tmp_path / "a.csv", lines)]), x=x)
    assert (curve.x_name, curve.x_label, curve.y_name) == ("gpu_hours", "GPU-hours", "scalerl/validation/pass_rate")
    assert list(zip(curve.compute, curve.score, strict=True)) == ROWS and curve.stderr == (0.01,) * 12
    assert choose_curve(read_run([tmp_path / "a.csv"]), x=x, y="pass").y_name == curve.y_name


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_other_encodings_are_refused_by_name(name: str, encoding: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, ["compute,score,Größe", *plain()[1:]], encoding)
    with pytest.raises(ReadError, match=rf"{name} is no text in UTF-8 .*convert it"):
        read_run([path])
    # In a folder, a file that is no log is passed over.
    with pytest.raises(ReadError, match="UTF-8" if name == "a.csv" else "holds no log"):
        read_run([tmp_path])


@pytest.mark.parametrize(
    "line", ["5", "[1, 2]", '{"step": 1}', '{"step": 1, "data": [1]}', '{"step": "x", "data": {}}']
)
def test_line_that_is_none_of_verl_s_logger_is_refused_with_its_number(line: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ['{"step": 0, "data": {}}', line, '{"step": 2, "data": {}}'])
    with pytest.raises(ReadError, match="line 2 is not a row of"):
        read_run([path])


def test_columns_of_a_report_stand_below_each_other_whatever_letters_a_name_has() -> None:
    text = report.table(["run", "A"], [["a", "1"], ["ünï", "2"], ["名前", "3"], ["e\u0301", "4"]])
    wide = {"名前": 2, "e\u0301": -1}
    ends = [len(line) + sum(extra for name, extra in wide.items() if name in line) for line in text.splitlines()]
    assert len(set(ends)) == 1, text


def test_huge_table_is_fitted_in_bounded_memory(tmp_path: Path) -> None:
    """A score for each of very many steps: grids over all of them at once would take gigabytes."""
    import tracemalloc

    from scalerl_verl.scaling import fit_curve

    compute = np.linspace(1500.0, 50000.0, 20_000)
    score = sigmoid(compute, 0.645, 1.7, 8000.0, 0.3) + np.random.default_rng(0).normal(0, 0.02, len(compute))
    for method in ("profile", "paper"):
        tracemalloc.start()
        fit = fit_curve(compute, score, R0=0.3, method=method)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert fit.A == pytest.approx(0.645, abs=0.003) and fit.B == pytest.approx(1.7, rel=0.02)
        assert peak < 400e6, f"{method}: {peak / 1e6:.0f} MB"
