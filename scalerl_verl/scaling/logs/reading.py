# SPDX-License-Identifier: Apache-2.0
"""Read a run from a folder or files, whatever logger wrote them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from scalerl_verl.scaling.logs import formats
from scalerl_verl.scaling.logs.segments import STEPS_FILE, ReadError, RunLog, Segment, join, split_attempts

TABLES = (".csv", ".parquet", ".pq")


def read_run(paths: Sequence[str | Path], name: str | None = None) -> RunLog:
    """Read one run; several files or folders are attempts at it and are joined.

    Args:
        paths: files (JSONL of verl's file logger, `events.out.tfevents.*`, `*.wandb`, CSV, Parquet) or folders with
            such files: of several kinds in a folder the first in this order counts, they hold the same.
        name: of the run; by default that of the first path.

    Raises:
        ReadError: nothing there that can be read.
    """
    given = [Path(path) for path in paths]
    if not given:
        raise ReadError("no files given")
    files: list[Path] = []
    for path in given:
        if not path.exists():
            raise ReadError(f"{path} does not exist")
        files += find_logs(path) if path.is_dir() else [path]
    name = name or (given[0].name if given[0].is_dir() else given[0].stem)
    folders = tuple(str(path / "validation") for path in given if (path / "validation").is_dir())
    if not folders:
        beside = {file.parent / "validation" for file in files}
        folders = tuple(sorted(str(path) for path in beside if path.is_dir()))
    plain = [path for path in files if path.suffix in TABLES]
    if plain:
        return _read_tables(files, plain, name)
    segments: list[Segment] = []
    for path in files:
        segments += _read_log(path)
    if not any(segment.steps for segment in segments):
        raise ReadError(f"{', '.join(map(str, given))}: no metrics in {len(files)} file(s)")
    return RunLog(name, join(segments), tuple(map(str, files)), validation_folders=folders)


def find_logs(folder: Path) -> list[Path]:
    """Files of a run's folder: JSONL, else TensorBoard, else W&B, else CSV, else Parquet.

    Of the JSONL files `STEPS_FILE` counts alone: verl's file logger wrote the same steps, or some of them.

    Raises:
        ReadError: none of them.
    """
    jsonl = [path for path in sorted(folder.glob("*.jsonl")) if _is_verl_log(path)]
    for found in (
        [path for path in jsonl if path.name == STEPS_FILE],
        jsonl,
        sorted(folder.rglob("events.out.tfevents.*")),
        # `latest-run` is a link to one of the others.
        sorted({path.resolve() for path in folder.rglob("run-*.wandb")}),
        sorted(folder.glob("*.csv")),
        sorted([*folder.glob("*.parquet"), *folder.glob("*.pq")]),
    ):
        if found:
            return found
    raise ReadError(
        f"{folder} holds no log: expected *.jsonl of verl's file logger (trainer.logger=[file], "
        "VERL_FILE_LOGGER_PATH), events.out.tfevents.*, run-*.wandb, *.csv or *.parquet"
    )


def _is_verl_log(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as stream:
        first = stream.readline()
    try:
        row = json.loads(first)
    except json.JSONDecodeError:
        return False
    return isinstance(row, dict) and {"step", "data"} <= set(row)


def _read_log(path: Path) -> list[Segment]:
    if path.suffix == ".wandb":
        return formats.read_wandb(path)
    if "tfevents" in path.name:
        return formats.read_tensorboard(path)
    if path.suffix in (".jsonl", ".json"):
        return formats.read_jsonl(path)
    raise ReadError(
        f"{path}: unknown kind of file; give *.jsonl (verl's file logger), events.out.tfevents.*, *.wandb, *.csv "
        "or *.parquet"
    )


def _read_tables(files: list[Path], plain: list[Path], name: str) -> RunLog:
    if len(plain) < len(files):
        raise ReadError(f"{plain[0]} is a table, other files of the run are not: give one kind")
    segments: list[Segment] = []
    for path in plain:
        columns = formats.read_csv(path) if path.suffix == ".csv" else formats.read_parquet(path)
        rows = formats.columns_to_rows(columns)
        if rows is None or "compute" in columns:
            if len(plain) > 1:
                raise ReadError(f"{path} has no column of steps: without it several tables cannot be joined")
            count = len(next(iter(columns.values()), []))
            steps = {i: {key: values[i] for key, values in columns.items()} for i in range(count)}
            return RunLog(name, steps, (str(path),), is_table=True)
        segments += split_attempts(rows, str(path))
    return RunLog(name, join(segments), tuple(map(str, plain)))
