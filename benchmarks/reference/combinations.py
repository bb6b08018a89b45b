# SPDX-License-Identifier: Apache-2.0
"""The table of docs/works-with.md: our pieces beside what users of verl run, by combinations.yaml and marks of tests.

A test that tries some of these pairs says so, ``@pytest.mark.works_with(THING, PIECES...)``, and so does one that sees
them refused for what the config alone does not say (``refused=True``). The marks are read from the source: making the
table imports no test.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.markdown import table
from benchmarks.rows import REPO

FILE = Path(__file__).with_name("combinations.yaml")
MARK = "works_with"
RUN, UNIT, REFUSED, UNTRIED = "run", "unit", "refused", "not tried"
_KINDS = {RUN: "a run of verl, vLLM and Ray", UNIT: "a test of the part", REFUSED: "sees the refusal"}


@dataclass(frozen=True)
class Trial:
    """A test that tries a thing beside pieces.

    Args:
        test: as pytest calls it, without parameters.
        kind: `RUN`, `UNIT` or `REFUSED`.
        in_ci: whether continuous integration runs it.
        thing: of combinations.yaml.
        pieces: of combinations.yaml.
    """

    test: str
    kind: str
    in_ci: bool
    thing: str
    pieces: tuple[str, ...]


@cache
def read_combinations() -> dict[str, Any]:
    """The file: ``pieces`` (name -> preset) and ``things``."""
    content: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return content


@cache
def find_trials() -> list[Trial]:
    """Every mark in the tests."""
    files = sorted((REPO / "tests").rglob("test_*.py"))
    return [trial for path in files for trial in _trials_of(path)]


def _trials_of(path: Path) -> Iterator[Trial]:
    text = path.read_text(encoding="utf-8")
    if MARK not in text:
        return
    tree = ast.parse(text)
    of_file = {_name(mark) for node in tree.body if _is_pytestmark(node) for mark in ast.walk(node)}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        names = of_file | {_name(mark) for mark in node.decorator_list}
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and _name(mark) == MARK:
                thing, *pieces = (ast.literal_eval(argument) for argument in mark.args)
                kind = REFUSED if mark.keywords else RUN if {"e2e", "gpu"} & names else UNIT
                test = f"{path.relative_to(REPO)}::{node.name}"
                yield Trial(test, kind, "gpu" not in names, thing, tuple(pieces))


def _is_pytestmark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(
        isinstance(name, ast.Name) and name.id == "pytestmark" for name in node.targets
    )


def _name(mark: ast.AST) -> str:
    """NAME of ``pytest.mark.NAME`` or ``pytest.mark.NAME(...)``; empty for anything else."""
    inner = mark.func if isinstance(mark, ast.Call) else mark
    return inner.attr if isinstance(inner, ast.Attribute) else ""


def _cell(thing: str, settings: Mapping[str, Any], piece: str) -> str:
    kinds = {trial.kind for trial in find_trials() if trial.thing == thing and piece in trial.pieces}
    is_refused = REFUSED in kinds or piece in settings.get("refused", {})
    tried = next((kind for kind in (RUN, UNIT) if kind in kinds), None)
    return " or ".join([*([tried] if tried else []), *([REFUSED] if is_refused else [])]) or UNTRIED


def combinations_table() -> str:
    """One line a thing, one column a piece."""
    content = read_combinations()
    lines = [
        (thing, *(_cell(thing, settings, piece) for piece in content["pieces"]))
        for thing, settings in content["things"].items()
    ]
    return table(("", *content["pieces"]), lines)


def short_table() -> str:
    """Its first five things, a column each: the pieces side by side are wider than a screen."""
    content = read_combinations()
    things = dict(list(content["things"].items())[:5])
    lines = [(piece, *(_cell(thing, things[thing], piece) for thing in things)) for piece in content["pieces"]]
    return table(("", *things), lines)


def trials_table() -> str:
    """What stands behind each cell that was tried."""
    lines = []
    for thing in read_combinations()["things"]:
        for trial in find_trials():
            if trial.thing == thing:
                where = "yes" if trial.in_ci else "no, it needs a GPU"
                lines.append((thing, ", ".join(trial.pieces), f"`{trial.test}`", _KINDS[trial.kind], where))
    return table(("", "pieces", "test", "what it is", "in CI"), lines)


def refusals_table() -> str:
    """The key that each refusal is about."""
    things = read_combinations()["things"]
    lines = [
        (thing, piece, f"`{key}`")
        for thing, settings in things.items()
        for piece, key in settings.get("refused", {}).items()
    ]
    return table(("", "piece", "refused because of"), lines)
