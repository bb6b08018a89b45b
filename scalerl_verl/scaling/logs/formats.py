# SPDX-License-Identifier: Apache-2.0
"""Readers of single files: verl's JSONL, TensorBoard events, W&B offline runs and exports, CSV, Parquet.

Packages beyond the standard library are imported where they are needed, and named when they are missing.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scalerl_verl.json_lines import split_lines
from scalerl_verl.scaling.logs.segments import ReadError, Segment, split_attempts

STEP_COLUMNS = ("step", "Step", "_step", "global_step", "trainer/global_step", "training/global_step")
WANDB_EXTREMES = ("__MIN", "__MAX")
NUMBER_COLUMNS = ("compute", "score", "stderr")
"""Columns in which a text is an error and not a missing number."""
MISSING = ("", "nan", "na", "n/a", "null", "none", "-")


def _need(module: str, what: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ReadError(f"reading {what} needs {package} ({error}): pip install {package}") from error


def read_jsonl(path: Path) -> list[Segment]:
    """verl's file logger: `{"step": 3, "data": {...}}` a line; several attempts may stand one after the other."""

    def rows() -> Iterator[tuple[int, dict[str, float]]]:
        lines = split_lines(read_text(path))
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                step, data = int(row["step"]), row["data"]
                if not isinstance(data, dict):
                    raise TypeError(f"data is a {type(data).__name__}")
            except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                if number == len(lines) and isinstance(error, json.JSONDecodeError):
                    return  # the run was killed while it wrote its last line
                raise ReadError(
                    f"{path} line {number} is not a line of verl's file logger ({error}): it holds objects like "
                    '{"step": 1, "data": {...}}'
                ) from error
            yield step, _numbers(data)

    return split_attempts(rows(), str(path))


def read_text(path: Path) -> str:
    """The text of a log.

    Raises:
        ReadError: it is in another encoding than UTF-8, or no text.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ReadError(f"{path} is no text in UTF-8 ({error.reason} at byte {error.start}): convert it") from error


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def read_tensorboard(path: Path) -> list[Segment]:
    """One event file: one attempt."""
    module = _need("tensorboard.backend.event_processing.event_file_loader", "TensorBoard event files", "tensorboard")
    util = _need("tensorboard.util.tensor_util", "TensorBoard event files", "tensorboard")
    began, rows = None, []
    for event in module.EventFileLoader(str(path)).Load():
        began = event.wall_time if began is None else began
        for value in event.summary.value:
            if not value.HasField("tensor"):
                continue
            array = util.make_ndarray(value.tensor)
            if array.size == 1 and array.dtype.kind in "fiu":
                rows.append((int(event.step), {value.tag: float(array.reshape(-1)[0])}))
    # Tags of one step may be written in any order, a later attempt has a file of its own.
    steps: dict[int, dict[str, float]] = {}
    for step, metrics in rows:
        steps.setdefault(step, {}).update(metrics)
    return [Segment(steps, began, str(path))] if steps else []


def read_wandb(path: Path) -> list[Segment]:
    """The `run-<id>.wandb` file of an offline (or synced) run."""
    proto = _need("wandb.proto.wandb_internal_pb2", "W&B offline runs", "wandb")
    steps: dict[int, dict[str, float]] = {}
    began = None
    for data in read_leveldb_log(path):
        record = proto.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run" and record.run.start_time.seconds:
            began = record.run.start_time.seconds + record.run.start_time.nanos * 1e-9
        if kind != "history":
            continue
        row: dict[str, Any] = {}
        for item in record.history.item:
            row[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        step = int(row.get("_step", record.history.step.num))
        steps.setdefault(step, {}).update(_numbers({k: v for k, v in row.items() if not k.startswith("_")}))
    return [Segment(steps, began, str(path))] if steps else []


def read_leveldb_log(path: Path) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format, which W&B writes after a header of 7 bytes.

    Blocks of 32 KiB hold chunks of (checksum 4, length 2, type 1) and data; types: 1 full, 2 first, 3 middle, 4 last. A
    run that was killed leaves a cut last record, which is dropped.
    """
    data = path.read_bytes()
    if data[:4] != b":W&B":
        raise ReadError(f"{path} is no W&B run file: it does not begin with ':W&B'")
    block, header = 32768, 7
    place, parts = header, []
    while place + header <= len(data):
        if block - place % block < header:
            place += block - place % block
            continue
        length = int.from_bytes(data[place + 4 : place + 6], "little")
        kind = data[place + 6]
        chunk = data[place + header : place + header + length]
        place += header + length
        if kind == 0 or len(chunk) < length:
            break
        parts.append(chunk)
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


def read_csv(path: Path) -> dict[str, list[float]]:
    """Columns of a CSV file; an empty cell is nan. A W&B export keeps its metrics' names, without run and extremes."""
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
    columns: dict[str, list[float]] = {name: [] for name in header}
    for number, row in enumerate(reader, 2):
        if not any(cell.strip() for cell in row):
            continue
        if len(row) != len(header):
            raise ReadError(f"{path} line {number} has {len(row)} cells, the header has {len(header)}")
        for name, cell in zip(header, row, strict=True):
            columns[name].append(_cell(path, number, name, cell.strip()))
    return strip_wandb(columns)


def _check_header(path: Path, header: list[str]) -> None:
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise ReadError(f"{path} has {header.count(twice)} columns {twice!r}: each needs a name of its own")
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


def _cell(path: Path, line: int, column: str, text: str) -> float:
    if _is_number(text):
        return float(text)
    if column in NUMBER_COLUMNS and text.lower() not in MISSING:
        hint = "write a point for the decimal comma" if _is_number(text.replace(",", ".")) else "correct it"
        raise ReadError(f"{path} line {line}, column {column}: {text!r} is no number; {hint} or leave the line out")
    return math.nan


def read_parquet(path: Path) -> dict[str, list[float]]:
    """Numeric columns of a Parquet file; null is nan."""
    table = _need("pyarrow.parquet", "Parquet files", "pyarrow").read_table(path)
    columns: dict[str, list[float]] = {}
    for name in table.column_names:
        values = table.column(name).to_pylist()
        if all(value is None or isinstance(value, int | float) for value in values):
            columns[name] = [math.nan if value is None else float(value) for value in values]
    return strip_wandb(columns)


def strip_wandb(columns: dict[str, list[float]]) -> dict[str, list[float]]:
    """`run - metric` -> `metric` as W&B exports it; its minimum and maximum columns are left out.

    Raises:
        ReadError: the export holds one metric of several runs.
    """
    found: dict[str, list[float]] = {}
    for name, values in columns.items():
        if " - " not in name:
            found[name] = values
            continue
        if name.endswith(WANDB_EXTREMES):
            continue
        metric = name.split(" - ", 1)[1]
        if metric in found:
            raise ReadError(f"the export holds {metric} of several runs: export one run a file")
        found[metric] = values
    return found


def columns_to_rows(columns: dict[str, list[float]]) -> list[tuple[int, dict[str, float]]] | None:
    """Rows by step if the table has a column of steps, else None."""
    name = next((name for name in STEP_COLUMNS if name in columns), None)
    if name is None:
        return None
    rows = []
    for i, step in enumerate(columns[name]):
        if math.isnan(step):
            continue
        rows.append((int(step), {key: v[i] for key, v in columns.items() if key != name and not math.isnan(v[i])}))
    return rows
