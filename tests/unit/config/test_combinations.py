# SPDX-License-Identifier: Apache-2.0
"""Each piece beside each thing that users of verl run: accepted at start, or refused with the key in the table."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks.reference.combinations import REFUSED, Trial, combinations_table, find_trials, read_combinations
from benchmarks.reference.launches import Launch
from scalerl_verl.config.checks import find_problems
from scalerl_verl.names import GROUP_SIZE
from tests.paths import REPO
from tests.unit.composed import compose_config, with_overrides

pytestmark = pytest.mark.usefixtures("clean_environment")

CONTENT = read_combinations()
PIECES, THINGS = CONTENT["pieces"], CONTENT["things"]


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("thing", THINGS)
def test_pair_is_accepted_or_refused_as_the_table_says(thing: str, piece: str) -> None:
    settings: dict[str, Any] = {GROUP_SIZE: 4, **THINGS[thing]["settings"]}
    lines = Launch(thing, "", settings, {}).lines()
    engine = [lines.pop(key) for key in ("model_engine",) if key in lines]
    problems = find_problems(with_overrides(compose_config(f"+scalerl={PIECES[piece]}", *engine), lines.values()))
    key = THINGS[thing].get("refused", {}).get(piece)
    assert [key in problem for problem in problems] == ([True] if key else [])


@pytest.mark.parametrize("trial", find_trials(), ids=lambda trial: f"{trial.test}-{trial.thing}")
def test_mark_names_a_row_and_columns_and_stands_on_a_test_that_is_collected(trial: Trial) -> None:
    assert trial.thing in THINGS and trial.pieces and set(trial.pieces) <= set(PIECES)
    file, _, name = trial.test.partition("::")
    assert re.search(rf"^def {name}\(", (REPO / file).read_text(), re.MULTILINE)


def test_table_has_a_cell_for_every_pair_and_calls_untried_what_no_test_tries() -> None:
    lines = combinations_table().splitlines()
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    tried = {(trial.thing, piece) for trial in find_trials() if trial.kind != REFUSED for piece in trial.pieces}
    cells = {(row[0], piece): cell for row in rows for piece, cell in zip(heads[1:], row[1:], strict=True)}
    assert list(cells) == [(thing, piece) for thing in THINGS for piece in PIECES]
    refused = {(thing, piece) for thing, entry in THINGS.items() for piece in entry.get("refused", {})}
    refused |= {(trial.thing, piece) for trial in find_trials() if trial.kind == REFUSED for piece in trial.pieces}
    assert {pair for pair, cell in cells.items() if cell == "not tried"} == set(cells) - tried - refused
    assert {pair for pair, cell in cells.items() if "refused" in cell} == refused
