# SPDX-License-Identifier: Apache-2.0
r"""Reader of JSON: verl's file logger, flat rows, trainer_state.json of Hugging Face's trainers.

A line ends at ``\n`` and at nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scalerl_verl.json_lines import split_lines
from scalerl_verl.scaling.logs.files import read_text
from scalerl_verl.scaling.logs.segments import Log, ReadError, split_attempts
from scalerl_verl.scaling.logs.tables import STEP_COLUMNS, Table, read_table
from scalerl_verl.scaling.logs.values import LeftOut, read_numbers, read_step

EXPECTED = (
    'expected objects such as {"step": 1, "data": {...}} of verl\'s file logger, or {"step": 1, "accuracy": 0.5} or '
    '{"compute": 1.5, "score": 0.5}'
)
HISTORY = "log_history"


def read_json(path: Path) -> list[Log]:
    """Runs in a file of JSON Lines, or in one JSON value: a list of rows, or a trainer's state.

    Raises:
        ReadError: it is neither.
    """
    text = read_text(path)
    if path.suffix == ".json":
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = None  # JSON Lines by another name, unless their reader says otherwise
        if isinstance(value, dict) and isinstance(value.get(HISTORY), list):
            return _read_rows(path, [(f"entry {i}", row) for i, row in enumerate(value[HISTORY], 1)], [])
        if isinstance(value, list):
            return _read_rows(path, [(f"entry {i}", row) for i, row in enumerate(value, 1)], [])
    notes: list[str] = []
    return _read_rows(path, list(_parse_lines(path, text, notes)), notes)


def is_log(path: Path) -> bool:
    """Whether the first row of a file of JSON Lines is one of a log."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="\n") as stream:
        first = next((line for line in stream if line.strip()), "")
    try:
        row = json.loads(first)
    except json.JSONDecodeError:
        return False
    return isinstance(row, dict) and (_is_nested(row) or _is_flat(row))


def _is_nested(row: dict[str, Any]) -> bool:
    return {"step", "data"} <= set(row)


def _is_flat(row: dict[str, Any]) -> bool:
    has_x = any(name in row for name in (*STEP_COLUMNS, "compute"))
    return has_x and len(read_numbers(row)) > 1


def _parse_lines(path: Path, text: str, notes: list[str]) -> Iterator[tuple[str, Any]]:
    lines = split_lines(text)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) and number > 1:
                # The run was killed while it wrote it, or is writing it now.
                notes.append(f"{path}: 1 row left out: its line was cut off (line {number})")
                return
            raise ReadError(f"{path} line {number} is no JSON ({error}): {EXPECTED}") from error


def _read_rows(path: Path, rows: list[tuple[str, Any]], notes: list[str]) -> list[Log]:
    for place, row in rows:
        if not isinstance(row, dict):
            raise ReadError(f"{path} {place} is not a row of a log but a {type(row).__name__}: {EXPECTED}")
    if rows and _is_nested(rows[0][1]):
        logs = [_read_nested(path, rows)]
    else:
        # Columns in the order in which they first appear.
        columns = list(dict.fromkeys(name for _, row in rows for name in row))
        if rows and not any(name in columns for name in (*STEP_COLUMNS, "compute", "score")):
            raise ReadError(f"{path} {rows[0][0]} is not a row of a log, it has {', '.join(columns[:8])}: {EXPECTED}")
        logs = read_table(Table(path, columns, rows, is_log=True))
    for log in logs[:1]:
        log.notes[:0] = notes
    return logs


def _read_nested(path: Path, rows: list[tuple[str, Any]]) -> Log:
    found, left_out, faults = [], LeftOut(), dict[str, str]()
    for place, row in rows:
        try:
            step, data = read_step(row["step"]), row["data"]
            if not isinstance(data, dict):
                raise TypeError(f"data is a {type(data).__name__}")
        except (KeyError, TypeError, ValueError) as error:
            raise ReadError(f"{path} {place} is not a row of verl's file logger ({error}): {EXPECTED}") from error
        if isinstance(step, str):
            left_out.add(step, place)
        else:
            found.append((step, read_numbers(data, faults, f"{path} {place}")))
    return Log(split_attempts(found, str(path)), faults=faults, notes=left_out.notes(str(path)))
