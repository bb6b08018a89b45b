# SPDX-License-Identifier: Apache-2.0
"""The commands: exit codes, JSON, and golden text."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scalerl_verl.cli import main
from scalerl_verl.scaling import sigmoid
from tests.paths import REPO
from tests.unit.scaling.logs.conftest import make_metrics, write_jsonl

GOLDEN = Path(__file__).parent / "golden"
FIT_KEYS = {
    "A", "B", "C_mid", "R0", "A_interval", "B_interval", "C_mid_interval", "verdict", "sse", "num_points",
}  # fmt: skip


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def answer_of(out: str) -> dict:
    """The JSON of a command, which has no NaN and no infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(out, parse_constant=refuse)


def only_run(out: str) -> dict:
    (entry,) = answer_of(out)["runs"]
    return entry


def test_csv_needs_no_options(write_csv, capsys):
    code, out, _ = run(capsys, "fit", write_csv("a"), "--json")
    fit = only_run(out)
    assert code == 0 and fit.keys() >= FIT_KEYS
    assert fit["verdict"] == "identified" and fit["num_points"] == 198
    assert fit["A"] == pytest.approx(0.645, abs=0.01) and fit["C_mid"] == pytest.approx(8000, rel=0.05)
    assert fit["A_interval"][0] < fit["A"] < fit["A_interval"][1]


@pytest.mark.parametrize("stderr", [False, True])
def test_methods_agree_and_the_default_is_never_worse(write_csv, capsys, stderr):
    path = write_csv("a", stderr=stderr)
    found = {}
    for method in ("profile", "paper"):
        code, out, _ = run(capsys, "fit", path, "--json", "--method", method, "--R0", "0.3")
        found[method] = only_run(out)
        assert code == 0 and found[method].keys() >= FIT_KEYS
    assert found["profile"]["sse"] <= found["paper"]["sse"]
    assert found["profile"]["A"] == pytest.approx(found["paper"]["A"], abs=0.006)


def test_short_window_has_another_exit_code_and_names_the_trouble(write_csv, capsys):
    code, out, _ = run(capsys, "fit", write_csv("a", last=4000), "--json")
    assert code == 3 and only_run(out)["verdict"] != "identified"


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        (["1,0.5", "2,0.6"], "too_few_points"),
        ([f"{i},0.5" for i in range(1, 12)], "constant_score"),
        ([f"{i},{i / 5}" for i in range(1, 12)], "score_out_of_range"),
        ([f"{i - 1},0.{i + 10}" for i in range(10)], "non_positive_compute"),
        ([f"{i // 2},0.{i + 10}" for i in range(10)], "duplicate_compute"),
        ([f"{i // 2 + 1},0.{i + 10}" for i in range(10)], "duplicate_compute"),
        ([f"{i + 1},0.{i + 10}" for i in range(10)] + ["11,inf"], "not_finite"),
    ],
)
def test_refusal_says_why_in_words_and_in_json(rows, verdict, tmp_path, capsys):
    path = tmp_path / "bad.csv"
    path.write_text("\n".join(["compute,score", *rows]))
    code, out, err = run(capsys, "fit", path, "--json")
    answer = answer_of(out)
    assert code == 4 and answer["runs"] == []
    (refusal,) = answer["refused"]
    assert refusal["run"] == "bad" and refusal["code"] == verdict and refusal["reason"] in err
    assert "refused: bad: " in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "nowhere"], "does not exist"),
        (["fit", "RUN", "--R0", "half"], "--R0 half"),
        (["fit", "RUN", "--grid-A", "0.4:0.8:0.1"], "--method paper"),
        (["fit", "RUN", "--method", "paper", "--grid-A", "one:two"], "no grid"),
        (["fit", "RUN", "--method", "paper", "--bootstrap", "10"], "--method paper"),
        (["fit", "RUN", "--names", "a", "b"], "--names has 2"),
        (["fit", "RUN", "RUN"], "given twice"),
        (["fit", "RUN", "--level", "7"], "level"),
        (["compare", "RUN"], "two or more"),
        (["plot", "RUN", "--out", "x.doc"], "must end in"),
        (["backtest", "RUN", "--shares", "2"], "shares"),
        (["fit", "RUN", "--seed", "-1"], "--seed -1: "),
        (["fit", "RUN", "--bootstrap", "1"], "--bootstrap 1: "),
        (["fit", "RUN", "--warm-up", "inf"], "--warm-up inf: "),
        (["predict", "RUN", "--at", "1e5", "nan"], "--at nan: "),
        (["predict", "RUN", "--budget", "inf"], "--budget inf: "),
        (["plot", "RUN", "--out", "x.png", "--until", "inf"], "--until inf: "),
        (["plot", "RUN", "--out", "x.png", "--until", "nan"], "--until nan: "),
        (["fit", "RUN", "--method", "paper", "--grid-A", "0:1:1e-12"], "at most 10,000"),
        (["fit", "RUN", "--method", "paper", "--grid-A", "0.1:inf:0.1"], "no grid"),
        (["fit", "RUN", "--method", "paper", "--grid-A", "0.1:1:1e-3", "--grid-C-mid", "1:9:1e3"], "250,000"),
        (["fit", "RUN", "--method", "paper", "--grid-C-mid", "1:9:2.5"], "whole number"),
    ],
)
def test_wrong_arguments_are_errors_that_say_what_to_do(arguments, message, write_csv, capsys):
    path = write_csv("a")
    code, _, err = run(capsys, *[path if a == "RUN" else a for a in arguments])
    assert code == 1 and err.startswith("error: ") and message in err


def test_unknown_option_is_a_usage_error(write_csv):
    with pytest.raises(SystemExit) as stop:
        main(["fit", str(write_csv("a")), "--magic"])
    assert stop.value.code == 2


def test_R0_is_the_score_measured_before_training(run_dir, capsys):
    _, out, _ = run(capsys, "fit", run_dir, "--json")
    fit = only_run(out)
    assert fit["R0_source"] == "observed" and fit["num_points"] == 20 and fit["x"] == "gpu_hours"
    low, high = fit["R0_interval"]
    assert low < fit["R0"] < high and fit["R0"] == pytest.approx(0.3, abs=0.006)
    _, out, _ = run(capsys, "fit", run_dir, "--json", "--R0", "fit")
    fitted = only_run(out)
    assert fitted["R0_source"] == "fitted" and fitted["R0_interval"][1] - fitted["R0_interval"][0] > high - low
    _, out, _ = run(capsys, "fit", run_dir, "--json", "--R0", "0.3")
    given = only_run(out)
    assert given["R0_source"] == "given" and given["R0"] == 0.3 and given["R0_interval"] is None


def test_row_at_zero_compute_is_the_score_before_training(tmp_path, capsys):
    rows = [f"{1000 * i},{sigmoid(1000.0 * i, 0.645, 1.7, 8000.0, 0.3) + 0.004 * (-1) ** i},0.01" for i in range(1, 41)]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["compute,score,stderr", "0,0.31,0.01", *rows]))
    _, out, _ = run(capsys, "fit", path, "--json")
    fit = only_run(out)
    assert fit["R0_source"] == "observed" and fit["num_points"] == 40 and fit["window"] == [1000, 40000]
    assert 0.29 < fit["R0"] < 0.31, "not the exact value of one observation"
    for command in ("predict", "backtest"):
        code, _, err = run(capsys, command, path, "--json")
        assert code in (0, 3), err


def test_papers_grid_can_be_given(write_csv, capsys):
    options = (
        "--method",
        "paper",
        "--R0",
        "0.3",
        "--grid-A",
        "0.6:0.7:0.001",
        "--grid-C-mid",
        "100:4000:100,4000:40000:100",
    )
    code, out, _ = run(capsys, "fit", write_csv("a", noise=0.0), "--json", *options)
    assert code == 0 and only_run(out)["A"] == pytest.approx(0.645, abs=2e-3)


def test_attempts_are_joined_on_request(tmp_path, capsys):
    metrics = make_metrics()
    one = write_jsonl(tmp_path / "1.jsonl", {s: d for s, d in metrics.items() if s <= 20})
    two = write_jsonl(tmp_path / "2.jsonl", {s: d for s, d in metrics.items() if s > 20})
    code, out, _ = run(capsys, "fit", one, two, "--join", "--json")
    assert code == 0 and only_run(out)["num_points"] == 20


def test_json_of_the_other_commands(write_csv, run_dir, capsys):
    a, b = write_csv("a"), write_csv("b", A=0.60)
    code, out, _ = run(capsys, "compare", a, b, "--json")
    compared = answer_of(out)
    assert code == 0 and compared["pairs"][0]["paper_winner"] == compared["pairs"][0]["interval_winner"] == "a"
    assert [row["recipe"] for row in compared["leave_one_out"]] == ["a", "b"]
    _, out, _ = run(capsys, "predict", a, "--at", 1e5, "--reach", 0.6, 0.9, "--budget", 1e5, "--json")
    predicted = only_run(out)
    assert (
        predicted["predictions"][0]["low"] < predicted["predictions"][0]["score"] < predicted["predictions"][0]["high"]
    )
    assert predicted["reach"][0]["compute"] > 8000 and predicted["reach"][1]["compute"] is None
    assert predicted["gain"]["gain"] > 0
    _, out, _ = run(capsys, "backtest", run_dir, "--json")
    assert [f["share"] for f in only_run(out)["forecasts"]] == [0.25, 0.5, 0.75]


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    expected = path.read_text()
    # The last digit may differ between builds of numpy and scipy: words and layout exactly, numbers to 1%.
    numbers = re.compile(r"-?\d[\d,]*\.?\d*(?:e[+-]\d+)?")
    assert numbers.sub("#", text) == numbers.sub("#", expected)
    for new, old in zip(numbers.findall(text), numbers.findall(expected), strict=True):
        assert float(new.replace(",", "")) == pytest.approx(float(old.replace(",", "")), rel=0.01, abs=2e-3)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("fit", ["fit", "a", "short", "--bootstrap", "64", "--rivals", "--R0", "0.3"]),
        ("fit_paper", ["fit", "a", "--method", "paper", "--R0", "0.3"]),
        ("compare", ["compare", "a", "b", "near"]),
        ("predict", ["predict", "a", "short", "--at", "1e5", "--reach", "0.6", "0.9", "--budget", "1e5"]),
        ("backtest", ["backtest", "a", "--R0", "0.3", "--shares", "0.02", "0.25", "0.5"]),
        ("quickstart", ["fit", "quickstart", "--x", "tokens"]),
        ("quickstart_ledger", ["fit", "quickstart_ledger", "--rivals"]),
        ("quickstart_backtest", ["backtest", "quickstart_ledger"]),
    ],
)
def test_golden_report(name, arguments, write_csv, capsys):
    paths = {
        "a": write_csv("a"),
        "b": write_csv("b", A=0.60),
        "near": write_csv("near", A=0.65),
        "short": write_csv("short", last=8000),
        # Logs of real runs of recipes/quickstart: one without the ledger, and one with it.
        "quickstart": Path(__file__).parent / "quickstart",
        "quickstart_ledger": Path(__file__).parent / "quickstart_ledger",
    }
    _, out, _ = run(capsys, *[paths.get(argument, argument) for argument in arguments])
    check_golden(name, out)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".html"])
@pytest.mark.parametrize("kind", ["curve", "linear"])
def test_plot_is_written(suffix, kind, write_csv, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "deeper" / f"plot{suffix}"
    code, _, _ = run(capsys, "plot", write_csv("a"), write_csv("b", A=0.6), "--R0", "0.3", "--kind", kind, "--out", out)
    assert code == 0
    content = out.read_bytes()
    assert content.startswith({".png": b"\x89PNG", ".svg": b"<?xml", ".html": b"<!doctype html>"}[suffix])
    if suffix == ".html":
        assert b"interval" in content and b"<script src" not in content


def test_plot_without_matplotlib_names_the_extra(write_csv, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, "plot", write_csv("a"), "--out", tmp_path / "x.png")
    assert code == 1 and "pip install 'scalerl-verl[plot]'" in err


def test_fit_runs_without_optional_packages(write_csv):
    """In a process where none of them can be imported."""
    code = (
        "import sys\n"
        "for name in ('matplotlib', 'rich', 'tensorboard', 'wandb', 'pyarrow', 'pandas', 'verl'):\n"
        "    sys.modules[name] = None\n"
        "from scalerl_verl.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(code)\n"
    )
    command = [sys.executable, "-c", code, "fit", str(write_csv("a")), "--bootstrap", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "identified" in done.stdout, done.stderr


@pytest.mark.parametrize("scale", [1e95, 1e-99])
def test_compute_in_any_unit_gives_the_same_curve_and_no_warning(scale, write_csv, tmp_path, capsys, recwarn):
    pytest.importorskip("matplotlib")
    rows = [line.split(",") for line in write_csv("a").read_text().splitlines()[1:]]
    path = tmp_path / "scaled.csv"
    path.write_text("\n".join(["compute,score", *(f"{float(c) * scale!r},{s}" for c, s in rows)]))
    code, out, _ = run(capsys, "fit", path, "--json", "--rivals")
    assert code == 0 and only_run(out)["A"] == pytest.approx(0.645, abs=0.01)
    assert run(capsys, "predict", path, "--reach", "0.5", "0.9")[0] == 0
    assert run(capsys, "plot", path, "--out", tmp_path / "x.svg", "--until", "1e100")[0] == 0
    assert not recwarn.list


@pytest.mark.parametrize("arguments", ["fit a.csv", "fit a.csv --json", "--help", "fit --help", "--version"])
def test_output_that_cannot_be_written_is_one_line_and_an_exit_code(arguments, write_csv):
    folder = write_csv("a").parent
    program = f"{sys.executable} -m scalerl_verl.cli {arguments}"
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    for unbuffered in ("", "1"):
        full = subprocess.run(
            ["bash", "-c", f"{program} > /dev/full"],
            cwd=folder, env={**env, "PYTHONUNBUFFERED": unbuffered}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert full.returncode == 1 and full.stderr == "error: the output cannot be written: No space left on device\n"
    if arguments == "fit a.csv":
        closed = subprocess.run(
            ["bash", "-c", f"{program} >&-"], cwd=folder, env=env, capture_output=True, text=True, timeout=120
        )
        assert closed.returncode == 1 and closed.stderr.count("\n") == 1 and "is closed" in closed.stderr
        quiet = subprocess.run(
            ["bash", "-c", f"{program} nowhere.csv --json 2>&-"],
            cwd=folder, env=env, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert quiet.returncode == 1 and answer_of(quiet.stdout)["refused"], "errors do not go where the answer goes"


def test_name_of_a_file_that_is_no_text_is_shown_by_escapes(write_csv, capsys):
    name = os.fsdecode(b"bad\xff\x1b[31m.csv")
    path = write_csv("a").rename(write_csv("a").parent / name)
    code, out, _ = run(capsys, "fit", path)
    assert code == 0 and "bad\\xff\\x1b[31m  0.6" in out and out.encode()
    code, out, _ = run(capsys, "fit", path, path.parent / os.fsdecode(b"no\xff"), "--json")
    assert code == 1 and "\\ud" not in out
    assert [entry["run"] for entry in answer_of(out)["runs"]] == ["bad\\xff\\x1b[31m"]


def test_reader_that_goes_away_is_no_traceback(write_csv):
    command = f"{sys.executable} -m scalerl_verl.cli fit {write_csv('a')} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stderr == "" and done.stdout.strip() in ("0", "141"), "0: it wrote before the reader had gone"
