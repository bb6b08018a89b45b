# SPDX-License-Identifier: Apache-2.0
"""`scalerl sizes` and `scalerl advise`, from tables on the disk to text, JSON and exit code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scalerl_verl.cli import main
from scalerl_verl.scaling import sigmoid

Capsys = pytest.CaptureFixture[str]


def write_run(path: Path, A: float, C_mid: float, seed: int, last: float = 40000.0) -> str:
    rng = np.random.default_rng(seed)
    compute = np.concatenate([[0.0], np.linspace(300, last, 50)])
    score = sigmoid(compute, A, 1.8, C_mid, 0.2) + 0.004 * rng.standard_normal(51)
    np.savetxt(path, np.c_[compute, score], delimiter=",", header="compute,score", comments="")
    return str(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("runs")
    settings = ((8, 0.58, 2000.0), (16, 0.66, 6000.0), (32, 0.7, 9000.0))
    return [write_run(folder / f"n{n}.csv", A, C_mid, n) for n, A, C_mid in settings]


def test_advice_names_the_best_setting_of_each_budget(runs: list[str], capsys: Capsys) -> None:
    arguments = ["advise", *runs, "--by", r"n(?P<n>\d+)", "--budget", "1500", "4e4"]
    assert main([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [advice["candidates"][0]["settings"] for advice in answer["advice"]] == [{"n": 8}, {"n": 32}]
    assert answer["best_by_budget"][-1]["setting"] == "n=32" and answer["runs"][0]["settings"] == {"n": 8}
    assert main(arguments) == 0
    assert "n=32 is the largest that was tried" in capsys.readouterr().out


def test_budget_about_which_no_run_says_anything_is_a_refusal_after_the_others(runs: list[str], capsys: Capsys) -> None:
    assert main(["advise", *runs, "--by", r"n(?P<n>\d+)", "--budget", "4e4", "1e7"]) == 4
    shown = capsys.readouterr()
    assert "At 40,000 compute: n=32" in shown.out and "1e+07" in shown.err


def test_law_over_sizes_says_what_it_extrapolates(runs: list[str], capsys: Capsys) -> None:
    assert main(["sizes", *runs, "--by", r"(?P<responses>\d+)", "--at", "20", "0.1k", "--json"]) == 0
    law = json.loads(capsys.readouterr().out)["law"]
    assert law["setting"] == "responses" and law["C_mid"]["exponent"] > 0 > law["one_minus_A"]["exponent"]
    assert [(told["size"], told["extrapolated"]) for told in law["predictions"]] == [(20, False), (100, True)]


def test_too_few_sizes_are_refused(runs: list[str], capsys: Capsys) -> None:
    assert main(["sizes", *runs[:2], "--by", r"n(?P<n>\d+)"]) == 4
    assert "3 sizes or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "by", "message"),
    [
        (["sizes"], r"(?P<a>\d+)[.]?(?P<b>\d*)", "is no positive number"),
        (["sizes"], r"x(?P<a>\d)", "not found in the run name"),
        (["advise", "--budget", "10"], r"n(?P<n>\d)", "a part of a number"),
        (["advise", "--budget", "10"], "(", "no regular expression"),
        (["advise", "--budget", "0"], r"n(?P<n>\d+)", "--budget 0: "),
        (["sizes"], r"x(?P<a>\d\d)", r"--by x(?P<a>\d\d) is not found"),
    ],
)
def test_arguments_that_mean_nothing_are_errors(
    command: list[str], by: str, message: str, runs: list[str], capsys: Capsys
) -> None:
    assert main([command[0], *runs[1:], "--by", by, *command[1:]]) == 1
    assert message in capsys.readouterr().err


def test_law_over_two_settings_is_refused(runs: list[str], tmp_path: Path, capsys: Capsys) -> None:
    run = write_run(tmp_path / "n4-b16.csv", 0.58, 2000.0, 4)
    assert main(["sizes", run, "--by", r"n(?P<n>\d+)-b(?P<batch>\d+)"]) == 1
    assert "one setting" in capsys.readouterr().err


def test_run_that_left_its_curve_is_no_candidate(runs: list[str], tmp_path: Path, capsys: Capsys) -> None:
    """Its curve says more than its points: a decline would be tied with a plateau."""
    rows = Path(runs[1]).read_text().splitlines()
    falling = [f"{40000 + 800 * i},{0.64 - 0.02 * i}" for i in range(1, 15)]
    (tmp_path / "n64.csv").write_text("\n".join([*rows, *falling]) + "\n")
    arguments = ["advise", runs[0], str(tmp_path / "n64.csv"), "--by", r"n(?P<n>\d+)", "--budget", "35000"]
    assert main(arguments) == 4
    shown = capsys.readouterr()
    assert "no comparison" in shown.out and "not_monotone" in shown.out


def test_ends_of_a_reach_hold_it(runs: list[str], capsys: Capsys) -> None:
    assert main(["predict", runs[0], "--reach", "0.3", "0.4", "0.5", "0.55", "--json"]) in (0, 3)
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert all(reach["low"] <= reach["compute"] <= reach["high"] for reach in run["reach"])


def test_one_run_s_budget_hides_no_other(runs: list[str], tmp_path: Path, capsys: Capsys) -> None:
    short = write_run(tmp_path / "short.csv", 0.58, 400.0, 5, last=4000.0)
    assert main(["predict", short, runs[0], "--budget", "8000", "--json"]) == 4
    answer = json.loads(capsys.readouterr().out)
    assert [run["run"] for run in answer["runs"]] == ["short"] and answer["refused"][0]["code"] == "budget_spent"


@pytest.mark.parametrize("content", [b"", b"PAR1 no parquet", b"a" * 200_000])
@pytest.mark.parametrize("name", ["bad.parquet", "bad.csv", "bad.jsonl", "bad.json"])
def test_file_that_no_reader_takes_hides_no_other(
    name: str, content: bytes, runs: list[str], tmp_path: Path, capsys: Capsys
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["fit", runs[0], str(tmp_path / name), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert [run["run"] for run in answer["runs"]] == ["n8"] and answer["refused"][0]["code"] == "unreadable"


def test_links_in_a_circle_and_nesting_without_end_are_said_of_their_run(
    runs: list[str], tmp_path: Path, capsys: Capsys
) -> None:
    (tmp_path / "loop.csv").symlink_to(tmp_path / "loop.csv")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert main(["fit", runs[0], str(tmp_path / "loop.csv"), str(tmp_path / "deep.json"), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["refused"]) == 2


def test_error_of_an_argument_is_json_too_and_loses_no_fit(runs: list[str], capsys: Capsys) -> None:
    assert main(["compare", *runs, "--reference", "nobody", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["runs"]) == 3 and "nobody" in answer["error"]


def test_picture_that_cannot_be_written_is_an_error_of_its_argument(
    runs: list[str], tmp_path: Path, capsys: Capsys
) -> None:
    assert main(["plot", runs[0], "--out", str(tmp_path / "x.tiff")]) == 1
    assert "must end in" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["plot", runs[0], "--out", str(tmp_path / "file" / "x.svg")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_runs_with_different_scores_are_said(tmp_path: Path, runs: list[str], capsys: Capsys) -> None:
    scores = [row.split(",")[1] for row in Path(runs[0]).read_text().splitlines()[1:]]
    for name in ("math", "code"):
        rows = [f"{step},{score}" for step, score in enumerate(scores)]
        (tmp_path / f"{name}.csv").write_text("\n".join([f"step,{name}/acc", *rows]) + "\n")
    main(["compare", str(tmp_path / "math.csv"), str(tmp_path / "code.csv"), "--x", "steps", "--y", "acc"])
    assert "different scores: math/acc (math), code/acc (code)" in capsys.readouterr().err


@pytest.mark.parametrize("R0", ["2", "-1", "nan", "much"])
def test_score_at_zero_compute_that_is_none_is_an_error(R0: str, runs: list[str], capsys: Capsys) -> None:
    assert main(["fit", runs[0], f"--R0={R0}"]) == 1
    assert "--R0" in capsys.readouterr().err


@pytest.mark.parametrize("num_good", [0, 1])
def test_advice_without_two_settings_that_could_be_fitted_says_no_more_than_why(
    num_good: int, runs: list[str], tmp_path: Path, capsys: Capsys
) -> None:
    for n in (64, 128):
        (tmp_path / f"n{n}.csv").write_text("\n".join(["compute,score", *(f"{i},0.5" for i in range(1, 12))]))
    bad = [str(tmp_path / f"n{n}.csv") for n in (64, 128)]
    arguments = ["advise", *runs[:num_good], *bad, "--by", r"n(?P<n>\d+)", "--budget", "1e4", "--json"]
    assert main(arguments) == 4
    answer = json.loads(capsys.readouterr().out)
    assert [refusal["code"] for refusal in answer["refused"]] == ["constant_score"] * 2 and answer["error"] is None
    assert answer["advice"] == answer["best_by_budget"] == [] and len(answer["runs"]) == num_good


def test_runs_of_one_setting_are_an_error_of_the_argument(runs: list[str], capsys: Capsys) -> None:
    assert main(["advise", runs[0], "--by", r"n(?P<n>\d+)", "--budget", "1e4"]) == 1
    assert "same settings (n=8)" in capsys.readouterr().err


def test_sizes_of_runs_that_are_all_refused_repeat_nothing(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "n4.csv").write_text("\n".join(["compute,score", *(f"{i},0.5" for i in range(1, 12))]))
    assert main(["sizes", str(tmp_path / "n4.csv"), "--by", r"n(?P<n>\d+)", "--json"]) == 4
    assert [refusal["run"] for refusal in json.loads(capsys.readouterr().out)["refused"]] == ["n4"]
