# SPDX-License-Identifier: Apache-2.0
"""The quickstart's report against numbers worked out by hand, and its errors."""

import json
import math
import re
import sys

import pytest


@pytest.fixture(scope="module")
def report(quickstart):
    return quickstart("report")


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluation(step, accuracies):
    """`accuracies`: {problem: the accuracy of each sample}."""
    return [
        {"input": problem, "output": "o", "gts": "1", "score": 2 * acc - 1, "acc": acc, "step": step}
        for problem, samples in accuracies.items()
        for acc in samples
    ]


@pytest.fixture
def run_dir(tmp_path):
    """Two problems: .25 at the start, (2/3 + 1) / 2 at the end; a resumed run logged step 2 again."""
    folder = tmp_path / "run"
    write_jsonl(folder / "validation" / "0.jsonl", evaluation(0, {"1+1": [0.0, 0.0], "2+2": [1.0, 0.0]}))
    write_jsonl(folder / "validation" / "2.jsonl", evaluation(2, {"1+1": [0.0, 1.0], "2+2": [1.0, 1.0]}))
    write_jsonl(folder / "validation" / "10.jsonl", evaluation(10, {"1+1": [1.0, 1.0, 0.0], "2+2": [1.0]}))
    key = "scalerl/data/generated_tokens_sum"
    lines = [{"step": 0, "data": {"val-core/acc": 0.25}}, {"step": 1, "data": {key: 100}}]
    lines += [{"step": 2, "data": data} for data in ({key: 999}, {key: 200}, {"val-core/acc": 0.75})]
    lines += [{"step": step, "data": {key: 10.0, "other": 1}} for step in range(3, 11)]
    write_jsonl(folder / "metrics.jsonl", lines)
    return folder


def test_summary_has_the_numbers_worked_out_by_hand(report, run_dir):
    summary = report.summarise(
        report.read_evaluations(run_dir), report.read_generated_tokens(run_dir), wall_s=12.5, peak_gib=1.5, seed=3
    )
    # Two problems: the sample standard deviation over sqrt(2) is half the difference.
    assert summary["start"] == pytest.approx({"pass_rate": 0.25, "stderr": 0.25, "num_problems": 2, "num_samples": 4})
    assert summary["final"] == pytest.approx({"pass_rate": 5 / 6, "stderr": 1 / 6, "num_problems": 2, "num_samples": 4})
    assert summary["gain"] == pytest.approx(7 / 12)
    assert summary["gain_stderr"] == pytest.approx(math.sqrt(1 / 16 + 1 / 36))
    assert summary["clear"] is False  # .25 + .5 is above .833 - .333
    assert [point["step"] for point in summary["points"]] == [0, 2, 10]  # as numbers, not as text
    assert [point["generated_tokens"] for point in summary["points"]] == [0, 300, 380]
    assert [point["pass_rate"] for point in summary["points"]] == pytest.approx([0.25, 0.75, 5 / 6])
    assert (summary["generated_tokens"], summary["steps"]) == (380, 10)
    assert (summary["wall_s"], summary["peak_gib"], summary["seed"]) == (12.5, 1.5, 3)
    assert summary["fit"]["identified"] is False and "2 points" in summary["fit"]["verdict"]


def test_clear_gain_is_called_clear(report):
    def summarise(final_rate):
        evaluations = [report.Evaluation(0, 0.3, 0.02, 9, 9), report.Evaluation(1, final_rate, 0.02, 9, 9)]
        return report.summarise(evaluations, {1: 5})

    assert summarise(0.381)["clear"] is True
    assert summarise(0.379)["clear"] is False
    assert "seed" not in summarise(0.4)


def test_identified_fit_is_reported(report):
    from scalerl_verl.scaling import sigmoid

    evaluations = [report.Evaluation(0, 0.3, 0.02, 9, 9)]
    tokens = {step: 1000 for step in range(1, 41)}
    for step in range(4, 41, 4):
        evaluations.append(report.Evaluation(step, float(sigmoid(step * 1000, 0.8, 1.5, 1e4, 0.3)), 0.02, 9, 9))
    fit = report.summarise(evaluations, tokens)["fit"]
    assert fit["identified"] is True
    assert fit["A"] == pytest.approx(0.8, abs=1e-3) and fit["C_mid"] == pytest.approx(1e4, rel=1e-3)


def test_command_writes_picture_and_summary(report, run_dir, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out" / "deeper"
    assert report.main(["--run-dir", str(run_dir), "--out", str(out), "--wall-seconds", "61", "--peak-gib", "2"]) == 0
    assert (out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "summary.json").read_text())["gain"] == pytest.approx(7 / 12)
    printed = capsys.readouterr().out
    assert "25.0% ± 25.0 points before training" in printed and "83.3% ± 16.7 points after 10 steps" in printed
    assert "NOT clear of its error bars" in printed and "61 s" in printed and "2.0 GiB" in printed


def test_missing_matplotlib_names_the_extra(report, run_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report.main(["--run-dir", str(run_dir), "--out", str(tmp_path / "out")]) == 1
    assert "pip install 'scalerl-verl[plot]'" in capsys.readouterr().err


def spoil(run_dir, what):
    validation, metrics = run_dir / "validation", run_dir / "metrics.jsonl"
    lines = re.findall(r"[^\n]*\n", metrics.read_text())
    if what == "no metrics":
        metrics.unlink()
    elif what == "empty metrics":
        metrics.write_text("\n")
    elif what == "cut metrics":
        metrics.write_text("".join(lines)[:-9])
    elif what == "no token metric":
        metrics.write_text(lines[0])
    elif what == "lost step":
        metrics.write_text("".join(line for line in lines if '"step": 7' not in line))
    elif what == "no start":
        (validation / "0.jsonl").unlink()
    elif what == "start only":
        for step in (2, 10):
            (validation / f"{step}.jsonl").unlink()
    elif what == "no validation":
        for path in validation.iterdir():
            path.unlink()
    elif what == "empty validation":
        (validation / "2.jsonl").write_text("")
    elif what == "other problems":
        write_jsonl(validation / "2.jsonl", evaluation(2, {"1+1": [0.0], "3+3": [1.0]}))
    elif what == "no accuracy":
        write_jsonl(validation / "2.jsonl", [{"input": "1+1", "score": 1.0}])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no metrics", "metrics.jsonl does not exist; add `file` to trainer.logger"),
        ("empty metrics", "metrics.jsonl is empty"),
        ("cut metrics", "line 13 is not JSON"),
        ("no token metric", "has no scalerl/data/generated_tokens_sum"),
        ("lost step", "step 7"),
        ("no start", "val_before_train=True"),
        ("start only", "test_freq"),
        ("no validation", "holds no <step>.jsonl"),
        ("empty validation", "2.jsonl is empty"),
        ("other problems", "other problems"),
        ("no accuracy", "lacks `input` or `acc`"),
    ],
)
def test_spoiled_runs_are_errors_that_say_what_to_do(report, run_dir, tmp_path, capsys, what, message):
    spoil(run_dir, what)
    assert report.main(["--run-dir", str(run_dir), "--out", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
