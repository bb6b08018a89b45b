# SPDX-License-Identifier: Apache-2.0
"""One JSON schema for every command and any number of runs; one refused run does not hide the others."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalerl_verl.cli import main
from scalerl_verl.scaling.answer import SCHEMA, Answer, make_plain
from tests.paths import REPO

COMMANDS: dict[str, list[str]] = {
    "fit": ["--bootstrap", "4", "--rivals"],
    "compare": [],
    "predict": ["--at", "1e5", "--reach", "0.6", "0.99", "--budget", "1e5"],
    "backtest": ["--shares", "0.02", "0.5"],
    "plot": ["--out", "curves.svg"],
}
EVERY = {"schema", "command", "runs", "groups", "refused"}
RUN = {"run", "x", "y"}
FIT = {"A", "A_interval", "B", "C_mid", "R0", "verdict", "identified", "level", "window", "troubles"}
ADDED: dict[str, set[str]] = {
    "fit": FIT | {"group", "bootstrap", "held_out"},
    "compare": FIT | {"group"},
    "predict": FIT | {"predictions", "reach", "gain"},
    "backtest": {"forecasts"},
    "plot": FIT | {"points"},
}
"""Command -> what it says of a run beside `RUN`."""
Ask = Callable[..., tuple[int, dict[str, Any], str]]


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Exit code, JSON and standard error of a command with its options of `COMMANDS` and the runs given."""
    monkeypatch.chdir(tmp_path)

    def call(command: str, *runs: object) -> tuple[int, dict[str, Any], str]:
        if command == "plot":
            pytest.importorskip("matplotlib")
        code = main([command, *map(str, runs), *COMMANDS[command], "--json"])
        captured = capsys.readouterr()
        return code, json.loads(captured.out, parse_constant=refuse), captured.err

    return call


@pytest.fixture
def constant(tmp_path: Path) -> Path:
    """A run whose data hold no curve."""
    path = tmp_path / "constant.csv"
    path.write_text("\n".join(["compute,score", *(f"{i},0.5" for i in range(1, 12))]))
    return path


def keys_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from keys_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from keys_of(item)


@pytest.mark.parametrize("command", COMMANDS)
def test_one_run_and_many_have_one_schema(command: str, ask: Ask, write_csv: Callable[..., Path]) -> None:
    one, two = write_csv("one"), write_csv("two", A=0.6)
    for runs in ([one], [one, two]) if command != "compare" else ([one, two], [one, two, write_csv("three")]):
        code, answer, err = ask(command, *runs)
        assert code in (0, 3), err
        assert answer.keys() >= EVERY and answer["schema"] == SCHEMA and answer["command"] == command
        assert [entry["run"] for entry in answer["runs"]] == [path.stem for path in runs]
        for entry in answer["runs"]:
            assert RUN | ADDED[command] <= entry.keys()
        assert answer["refused"] == answer["groups"] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_refused_run_does_not_hide_the_others(
    command: str, ask: Ask, write_csv: Callable[..., Path], constant: Path
) -> None:
    code, answer, err = ask(command, write_csv("one"), constant, write_csv("two", A=0.6))
    assert code == 4
    assert [entry["run"] for entry in answer["runs"]] == ["one", "two"]
    (refusal,) = answer["refused"]
    assert refusal["run"] == "constant" and err == f"refused: constant: {refusal['reason']}\n"
    if command == "compare":
        assert [(pair["first"], pair["second"]) for pair in answer["pairs"]] == [("one", "two")]


@pytest.mark.parametrize("command", COMMANDS)
def test_log_that_cannot_be_read_does_not_hide_the_others(
    command: str, ask: Ask, write_csv: Callable[..., Path]
) -> None:
    code, answer, err = ask(command, "nowhere.csv", write_csv("one"), write_csv("two", A=0.6))
    assert code == 1 and [entry["run"] for entry in answer["runs"]] == ["one", "two"]
    assert [(refusal["run"], refusal["code"]) for refusal in answer["refused"]] == [("nowhere.csv", "unreadable")]
    assert err == "error: nowhere.csv does not exist\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_run_refused_is_still_an_answer(command: str, ask: Ask, constant: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text(constant.read_text())
    code, answer, _ = ask(command, constant, other)
    assert code == 4 and [refusal["run"] for refusal in answer["refused"]] == ["constant", "other"]
    assert answer["runs"] == []
    assert not (tmp_path / "curves.svg").exists()


def test_text_of_the_others_is_printed_before_the_refusal(
    write_csv: Callable[..., Path], constant: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", str(constant), str(write_csv("one"))]) == 4
    captured = capsys.readouterr()
    assert "one: A = 0.64" in captured.out and "constant" not in captured.out
    assert captured.err.startswith("refused: constant: ")


def test_comparison_with_the_reference_refused_has_pairs_and_no_table(
    write_csv: Callable[..., Path], constant: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(path) for path in (constant, write_csv("one"), write_csv("two", A=0.6))]
    assert main(["compare", *paths, "--reference", "constant", "--json"]) == 4
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["pairs"]) == 1 and answer["leave_one_out"] == []


def test_picture_of_runs_that_are_not_identified_is_done(ask: Ask, write_csv: Callable[..., Path]) -> None:
    code, answer, _ = ask("plot", write_csv("short", last=4000))
    (entry,) = answer["runs"]
    assert code == 0 and not entry["identified"]
    assert Path(answer["picture"]["file"]).read_text().startswith("<?xml")
    assert len(entry["points"]["compute"]) == len(entry["points"]["score"]) == entry["num_points"]
    assert answer["picture"]["until"] == pytest.approx(4 * entry["window"][1])


def test_run_without_any_forecast_is_refused(
    write_csv: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["backtest", str(write_csv("one")), "--shares", "0.02", "0.03", "--json"]) == 4
    answer = json.loads(capsys.readouterr().out)
    (refusal,) = answer["refused"]
    assert answer["runs"] == [] and refusal["code"] == "no_forecast" and "of 2%: " in refusal["reason"]


def test_numbers_that_json_lacks_are_null() -> None:
    value = {"a": [math.nan, (1.5, math.inf)], "b": np.float64(-math.inf), "c": np.array([1.0, math.nan]), "d": True}
    assert make_plain(value) == {"a": [None, [1.5, None]], "b": None, "c": [1.0, None], "d": True}
    answer = Answer("fit", runs=[{"run": "a", "A": math.nan}])
    assert json.loads(json.dumps(answer.to_dict(), allow_nan=False))["runs"][0]["A"] is None


def fields_of_the_page() -> set[str]:
    sections = re.split(r"^## ", (REPO / "docs" / "scaling.md").read_text(), flags=re.MULTILINE)
    (text,) = (section for section in sections if section.startswith("JSON"))
    return set(re.findall(r"`(\w+)`", text))


@pytest.mark.parametrize("command", COMMANDS)
def test_page_names_every_field(command: str, ask: Ask, write_csv: Callable[..., Path], constant: Path) -> None:
    named = fields_of_the_page()
    _, answer, _ = ask(command, write_csv("one", last=8000), write_csv("two", A=0.645), constant)
    assert sorted(set(keys_of(answer)) - named) == []


def test_page_names_every_field_of_groups(write_csv: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    named = fields_of_the_page()
    paths = [str(write_csv(name)) for name in ("one", "two", "three")]
    main(["compare", *paths, "--group", "a=t*", "--group", "b=one", "--json"])
    answer = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert len(answer["groups"]) == 2 and sorted(set(keys_of(answer)) - named) == []
