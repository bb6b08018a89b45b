# SPDX-License-Identifier: Apache-2.0
"""Reader of tables: CSV, Parquet, flat JSON rows; runs in one table are told apart by a column or by column names."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalerl_verl.scaling.logs.files import need, read_text
from scalerl_verl.scaling.logs.segments import Log, ReadError, Segment, Steps, differ, split_attempts
from scalerl_verl.scaling.logs.values import LeftOut, read_number, read_step

STEP_COLUMNS = ("step", "Step", "_step", "global_step", "trainer/global_step", "training/global_step")
RUN_COLUMNS = ("run", "run_name", "run name", "run_id", "run id", "experiment", "experiment_name", "exp_name", "trial")
SEED_COLUMN = "seed"
NUMBER_COLUMNS = ("compute", "score", "stderr")
"""Columns that are read as numbers whatever stands in them."""
BETWEEN = " - "
"""W&B's export writes `run - metric`; names of runs may have it, too."""
EXTREMES = ("__MIN", "__MAX")
TIMES = "_timestamp"
"""SwanLab's tables have such a column beside each metric."""


@dataclass(frozen=True)
class Table:
    """Rows as they stand: their place in the file, and column -> text, number, or None for null.

    is_log: the order of the rows is that in which they were written. has_thousands: `1,000` can only be a thousand.
    step: the column of steps, if there is one. own: the columns of the one run that a part of an export is about.
    """

    path: Path
    columns: list[str]
    rows: list[tuple[str, dict[str, Any]]]
    is_log: bool = False
    has_thousands: bool = True
    step: str | None = None
    own: frozenset[str] = frozenset()


def read_csv(path: Path) -> list[Log]:
    """Runs of a CSV file.

    Raises:
        ReadError: it is no table with a header.
    """
    lines = io.StringIO(read_text(path), newline="")
    first = lines.readline()
    lines.seek(0)
    # Spreadsheets write semicolons or tabs where the comma is in use otherwise.
    delimiter = next((mark for mark in ",;\t" if mark in first), ",")
    reader = csv.reader(lines, delimiter=delimiter)
    try:
        header = [name.strip() for name in next(reader)]
    except StopIteration:
        raise ReadError(f"{path} is empty: a CSV file needs a header such as compute,score,stderr") from None
    _check_header(path, header)
    rows = []
    for row in reader:
        number = reader.line_num  # a cell in quotes may hold several lines
        if not any(cell.strip() for cell in row):
            continue
        if len(row) != len(header):
            raise ReadError(f"{path} line {number} has {len(row)} cells, the header has {len(header)}")
        rows.append((f"line {number}", {n: cell.strip() for n, cell in zip(header, row, strict=True)}))
    return read_table(Table(path, header, rows, has_thousands=delimiter == ","))


def read_parquet(path: Path) -> list[Log]:
    """Runs of a Parquet file; null and NaN are empty cells there, for pandas writes these as one of those."""
    table = need("pyarrow.parquet", "Parquet files", "pyarrow").read_table(path)
    columns = {}
    for name in table.column_names:
        values = table.column(name).to_pylist()
        columns[name] = ["" if v is None or (isinstance(v, float) and math.isnan(v)) else v for v in values]
    num_rows = len(next(iter(columns.values()), []))
    rows = [(f"row {i + 1}", {name: values[i] for name, values in columns.items()}) for i in range(num_rows)]
    return read_table(Table(path, list(columns), rows))


def read_table(table: Table) -> list[Log]:
    """Runs of a table, each by its name; a table of one run has none."""
    columns = set(table.columns)
    table = replace(
        table, columns=[n for n in table.columns if not (n.endswith(TIMES) and n.removesuffix(TIMES) in columns)]
    )
    parts = _split_by_column(table) or _split_by_header(table) or [("", table)]
    logs = []
    for name, part in parts:
        step = next((n for n in STEP_COLUMNS if n in part.columns and n not in part.own), None)
        step = step or next((n for n in STEP_COLUMNS if n in part.columns), None)
        is_plain = step is None or "compute" in part.columns
        log = _read_rows(part) if is_plain else _read_steps(replace(part, step=step))
        logs.append(replace(log, name=name or None, is_split=len(parts) > 1))
    return logs


def _check_header(path: Path, header: list[str]) -> None:
    name, times = Counter(header).most_common(1)[0]
    if times > 1:
        raise ReadError(f"{path} has {times} columns {name!r}: each needs a name of its own")
    if all(_is_number(name) for name in header):
        raise ReadError(
            f"{path} begins with numbers ({', '.join(header)}): its first line must name the columns, such as "
            "compute,score,stderr"
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _split_by_column(table: Table) -> list[tuple[str, Table]]:
    """Parts by the columns that name a run and its seed; none if there is no such column."""
    by_name = {column.lower(): column for column in reversed(table.columns)}
    keys = [by_name[name] for name in RUN_COLUMNS if name in by_name][:1]
    keys += [by_name[SEED_COLUMN]] if SEED_COLUMN in by_name else []
    # A column that has one value throughout tells nothing apart.
    keys = [key for key in keys if len({str(row.get(key)) for _, row in table.rows}) > 1]
    if not keys:
        return []
    parts: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for place, row in table.rows:
        words = [
            f"seed {row.get(key)}" if key.lower() == SEED_COLUMN else str(row.get(key) or "unnamed") for key in keys
        ]
        parts.setdefault(" ".join(words), []).append((place, row))
    columns = [name for name in table.columns if name not in keys]
    return [(name, replace(table, columns=columns, rows=rows)) for name, rows in parts.items()]


def _split_by_header(table: Table) -> list[tuple[str, Table]]:
    """Parts by the names of runs in the header of an export from W&B, be it one; none if it has none.

    Of a name with several ` - ` the last one ends the run's. The columns of minimum and maximum are left out.
    """
    if table.is_log or not any(BETWEEN in name for name in table.columns):
        return []
    shared = [name for name in table.columns if BETWEEN not in name]
    runs: dict[str, dict[str, str]] = {}
    for column in table.columns:
        if BETWEEN in column and not column.endswith(EXTREMES):
            run, _, metric = column.rpartition(BETWEEN)
            runs.setdefault(run, {})[metric] = column
    parts = []
    for run, own in runs.items():
        rows = [
            (place, {n: row[n] for n in shared} | {metric: row[column] for metric, column in own.items()})
            for place, row in table.rows
            # The rows of an export are those of its longest run.
            if len(runs) == 1 or any(row[column] != "" for column in own.values())
        ]
        columns = [*(n for n in shared if n not in own), *own]
        parts.append((run, replace(table, columns=columns, rows=rows, own=frozenset(own))))
    return parts


def _read_rows(table: Table) -> Log:
    """A table without steps: each row is a point."""
    numbers, faults = _parse(table)
    metrics = _metrics(table, numbers)
    rows = {}
    for i, (_, cells) in enumerate(numbers):
        rows[i] = {name: math.nan if (value := cells.get(name)) is None else value for name in metrics}
    return Log(rows=rows, places={i: place for i, (place, _) in enumerate(numbers)}, faults=faults)


def _read_steps(table: Table) -> Log:
    """A table of steps. In one that is no log rows may stand in any order, so that no row can overrule another."""
    assert table.step is not None
    numbers, faults = _parse(table)
    metrics, left_out = _metrics(table, numbers), LeftOut()
    sparse = {name for name in metrics if 2 * sum(cells.get(name) is None for _, cells in numbers) > len(numbers)}
    rows: list[tuple[int, dict[str, float]]] = []
    places = []
    for (place, cells), (_, raw) in zip(numbers, table.rows, strict=True):
        try:
            step = read_step(raw.get(table.step, ""), table.has_thousands)
        except ValueError as error:
            raise ReadError(f"{table.path} {place}, column {table.step}: {error}") from None
        if isinstance(step, str):
            left_out.add(step, place)
            continue
        found = {}
        for name in metrics:
            value = cells.get(name)
            # Where most cells are empty the metric was not logged at each step; else a value is missing.
            if value is None and name in cells and name not in sparse:
                value = math.nan
            if value is not None:
                found[name] = value
        rows.append((step, found))
        places.append(place)
    source = str(table.path)
    notes = left_out.notes(source)
    if table.is_log:
        return Log(split_attempts(rows, source), faults=faults, notes=notes)
    return Log([Segment(_merge(table, rows, places, faults), None, source)], faults=faults, notes=notes)


def _merge(table: Table, rows: list[tuple[int, dict[str, float]]], places: list[str], faults: dict[str, str]) -> Steps:
    """Metrics by step; a metric with two values at one step becomes a fault."""
    steps: Steps = {}
    first: dict[int, str] = {}
    for (step, found), place in zip(rows, places, strict=True):
        known = steps.setdefault(step, {})
        for name in differ(known, found):
            if not math.isnan(known[name] + found[name]):
                faults.setdefault(
                    name,
                    f"{table.path} has two values of {name} at step {step}, {known[name]:g} and {found[name]:g} "
                    f"({first[step]} and {place}): name the run of each row in a column `run`, or keep one row a step",
                )
        first.setdefault(step, place)
        known.update({name: value for name, value in found.items() if math.isnan(known.get(name, math.nan))})
    return dict(sorted(steps.items()))


def _parse(table: Table) -> tuple[list[tuple[str, dict[str, float | None]]], dict[str, str]]:
    """Numbers of every row, None for empty cells; and column -> the first text in it that is none."""
    rows: list[tuple[str, dict[str, float | None]]] = []
    faults: dict[str, str] = {}
    for place, row in table.rows:
        cells: dict[str, float | None] = {}
        for name in table.columns:
            if name not in row or name == table.step:
                continue
            try:
                cells[name] = read_number(row[name])
            except ValueError:
                faults.setdefault(name, f"{table.path} {place}, column {name}: {_what_is_wrong(row[name])}")
                cells[name] = None
        rows.append((place, cells))
    return rows, faults


def _what_is_wrong(value: Any) -> str:
    is_comma = isinstance(value, str) and _is_number(value.replace(",", ".", 1).replace(",", ""))
    hint = "write a point for the decimal comma, and no comma for thousands" if is_comma else "correct it"
    return f"{value!r} is no number; {hint} or leave the line out"


def _metrics(table: Table, numbers: list[tuple[str, dict[str, float | None]]]) -> list[str]:
    """Columns with a number in any row."""
    found = {name for _, cells in numbers for name, value in cells.items() if value is not None}
    return [name for name in table.columns if name != table.step and (name in found or name in NUMBER_COLUMNS)]
