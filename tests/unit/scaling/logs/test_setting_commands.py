# SPDX-License-Identifier: Apache-2.0
"""`scalerl sizes` and `scalerl advise`, from tables on the disk to text, JSON and exit code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scalerl_verl.cli import main
from scalerl_verl.scaling import sigmoid


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


def test_advice_names_the_best_setting_of_each_budget(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["advise", *runs, "--by", r"n(?P<n>\d+)", "--budget", "1500", "4e4"]
    assert main([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [advice["candidates"][0]["settings"] for advice in answer["advice"]] == [{"n": 8}, {"n": 32}]
    assert answer["best_by_budget"][-1]["setting"] == "n=32" and answer["runs"][0]["settings"] == {"n": 8}
    assert main(arguments) == 0
    assert "n=32 is the largest that was tried" in capsys.readouterr().out


def test_budget_about_which_no_run_says_anything_is_a_refusal_after_the_others(
    runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", *runs, "--by", r"n(?P<n>\d+)", "--budget", "4e4", "1e7"]) == 4
    shown = capsys.readouterr()
    assert "At 40,000 compute: n=32" in shown.out and "1e+07" in shown.err


def test_law_over_sizes_says_what_it_extrapolates(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sizes", *runs, "--by", r"(?P<responses>\d+)", "--at", "20", "0.1k", "--json"]) == 0
    law = json.loads(capsys.readouterr().out)["law"]
    assert law["setting"] == "responses" and law["C_mid"]["exponent"] > 0 > law["one_minus_A"]["exponent"]
    assert [(told["size"], told["extrapolated"]) for told in law["predictions"]] == [(20, False), (100, True)]


def test_too_few_sizes_are_refused(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sizes", *runs[:2], "--by", r"n(?P<n>\d+)"]) == 4
    assert "3 sizes or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "by", "message"),
    [
        (["sizes"], r"(?P<a>\d)(?P<b>\d*)", "one setting"),
        (["sizes"], r"x(?P<a>\d)", "not found in the run name"),
        (["advise", "--budget", "10"], "(", "no regular expression"),
        (["advise", "--budget", "0"], r"n(?P<n>\d+)", "budget=0.0"),
    ],
)
def test_arguments_that_mean_nothing_are_errors(
    command: list[str], by: str, message: str, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command[0], *runs[1:], "--by", by, *command[1:]]) == 1
    assert message in capsys.readouterr().err
