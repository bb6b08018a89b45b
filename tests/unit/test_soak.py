# SPDX-License-Identifier: Apache-2.0
"""What the soak run (tests/faults/soak.py) takes for a loss, on made-up records of one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launching import NUM_PROMPTS
from tests.e2e.pipeline_data import Response
from tests.faults import soak

STEPS = 160


def make_responses(lost: tuple[int, ...] = ()) -> list[Response]:
    """One response a group, in the order of the data; a row is left out as often as ``lost`` has it."""
    left, found, position = Counter(lost), [], 0
    while len(found) < STEPS * NUM_PROMPTS:
        row, position = position % soak.NUM_ROWS, position + 1
        if left[row]:
            left[row] -= 1
            continue
        step = 1 + len(found) // NUM_PROMPTS
        content = json.dumps([{"content": f"{row}+1"}])
        found.append(Response(step, f"g{position}", [1], [2, 3], [1, 1], [0.0, 0.0], [[step - 1, 2]], 0, content))
    return found


def judge(
    monkeypatch: pytest.MonkeyPatch,
    responses: list[Response],
    given_up: int = 0,
    left_out: tuple[str, ...] = (),
    logged: Iterable[int] = range(1, STEPS + 1),
    log: str = "generator 0 is up again\ngenerators 0 are back\ngenerators 1 are back",
) -> list[str]:
    monkeypatch.setattr(soak, "read_responses", lambda _: responses)
    harm = soak.Harm(Path(), Path(), 1, STEPS, 0)
    harm.harmed_rows = {3, 5}
    harm.done.update(fault for fault in soak.FAULTS if fault not in left_out)
    samples: list[dict[str, Any]] = [{"step": step, "held": {7: ("x", 1000, 9)}} for step in range(STEPS)]
    names = ("scalerl/pipeline/groups_given_up_sum", "scalerl/pipeline/groups_reissued_sum")
    metrics = {step: dict.fromkeys(names, float(step == 9) * given_up) for step in range(1, STEPS + 1)}
    rows = [{"step": step, "data": metrics[step]} for step in logged]
    return soak.judge(Path(), STEPS, harm, [soak.Attempt(samples, metrics, log)], rows)[1]


def test_run_that_lost_nothing_but_what_it_told_of_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge(monkeypatch, make_responses()) == []
    assert judge(monkeypatch, make_responses((3, 3, 5)), given_up=3) == []


@pytest.mark.parametrize(
    ("lost", "given_up", "problem"),
    [((3,), 0, "trained twice"), ((3, 5), 1, "trained twice"), ((9,), 1, "lost, 1 reported"), ((), 1, "were lost")],
)
def test_loss_is_noticed(monkeypatch: pytest.MonkeyPatch, lost: tuple[int, ...], given_up: int, problem: str) -> None:
    """Untold; one of two untold; of a row that was left alone; told of, and not lost."""
    assert problem in str(judge(monkeypatch, make_responses(lost), given_up))


@pytest.mark.parametrize("logged", [[*range(1, 50), *range(51, STEPS + 1)], [*range(1, STEPS + 1), 50]])
def test_step_without_metrics_or_with_two_rows_is_noticed(monkeypatch: pytest.MonkeyPatch, logged: list[int]) -> None:
    assert "the log of steps has" in str(judge(monkeypatch, make_responses(), logged=logged))


def test_fault_that_was_never_done_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge(monkeypatch, make_responses(), left_out=("full disk",)) == ["never done: full disk"]


@pytest.mark.parametrize(
    ("log", "kind"),
    [("generators 1 are back", "killed"), ("generator 0 is up again\ngenerators 0 are back", "stopped")],
)
def test_generator_that_never_came_back_is_noticed(monkeypatch: pytest.MonkeyPatch, log: str, kind: str) -> None:
    (problem,) = judge(monkeypatch, make_responses(), log=log)
    assert f"no {kind} generator" in problem


def test_generator_whose_run_ended_before_it_took_part_hides_no_other() -> None:
    assert soak.count_returned("generator 0 is up again\ngenerators 1 are back\n") == 1
    assert soak.count_returned("generator 0 is up again\ngenerators 0, 1 are back\ngenerators 0 are back") == 2


def test_half_a_line_of_metrics_is_not_read(tmp_path: Path) -> None:
    """A run that is looked at while it writes, its first line or a later one."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "da')
    assert soak.last_step(tmp_path) == 0
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert soak.last_step(tmp_path) == 2
