# SPDX-License-Identifier: Apache-2.0
"""Read runs from folders or files, whatever logger wrote them. Several runs in one place are told apart."""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from scalerl_verl.scaling.logs import event_files, json_logs, mlflow_store, tables, wandb_runs
from scalerl_verl.scaling.logs.places import Place, find_places, name_of
from scalerl_verl.scaling.logs.segments import (
    Log,
    ReadError,
    RunLog,
    Segment,
    join,
    order_attempts,
    take_out_nan,
    tell_apart,
)
from scalerl_verl.scaling.logs.values import count

_READERS: dict[str, Callable[[Path], list[Log]]] = {
    ".jsonl": json_logs.read_json,
    ".json": json_logs.read_json,
    ".wandb": wandb_runs.read_wandb,
    ".csv": tables.read_csv,
    ".parquet": tables.read_parquet,
    ".pq": tables.read_parquet,
}
ERRORS = (OSError, ValueError, RuntimeError, csv.Error)
"""What a file can make a reader raise; ReadError and RecursionError are among them."""


@dataclass
class _Found:
    """What was read of a run: its logs, their place, its name, and whether the log itself says it."""

    name: str
    place: Place
    logs: list[Log] = field(default_factory=list)
    is_named: bool = False


def read_runs(
    path: str | Path, name: str | None = None, tell: Callable[[Path, Exception], None] | None = None
) -> list[RunLog]:
    """Read every run of a file or folder.

    Args:
        path: a file (JSON Lines, trainer_state.json, `events.out.tfevents.*`, `*.wandb`, CSV, Parquet), or a folder
            with such files or runs of MLflow: of several kinds the first that `find_places` names counts.
        name: of the run; of several runs the beginning of their names.
        tell: takes the error of a run of several that cannot be read, with its file; without it the error is raised.

    Raises:
        ReadError: nothing there that can be read.
    """
    path = Path(path)
    places = find_places(path)
    found: list[_Found] = []
    notes = [note for place in places for note in place.notes]
    failed = 0
    for place in places:
        try:
            items = _read_place(place, is_alone=len(places) == 1)
        except ERRORS as error:
            if tell is None or len(places) == 1:
                raise
            failed += 1
            tell(place.files[0], error)
            continue
        found += items
        if not items:
            notes += [f"{file} is left out: it has no metrics" for file in place.files]
    runs: list[RunLog] = []
    for item in found:
        built = _build_all(item)
        runs += built
        if not built:
            notes += [note for log in item.logs for note in log.notes] or [
                f"{item.place.files[0]} is left out: it has no metrics"
            ]
    runs = _leave_out_side_writers(runs)
    if not runs:
        if failed:
            return []
        why = "".join(f"; {note}" for note in notes)
        raise ReadError(f"{path}: no metrics in {count(sum(len(place.files) for place in places), 'file')}{why}")
    runs[0] = replace(runs[0], notes=(*notes, *runs[0].notes))
    if len(runs) == 1 and not failed:
        (own,) = {item.name for item in found if item.is_named and item.name == runs[0].name} or {name_of(path)}
        return [replace(runs[0], name=name or own)]
    runs = _name_apart(runs)
    if name:
        runs = [replace(run, name=f"{name}/{run.name}") for run in runs]
    # A dump of validations beside several runs is of none of them.
    beside = str(path / "validation")
    return [
        replace(run, validation_folders=tuple(folder for folder in run.validation_folders if folder != beside))
        for run in runs
    ]


def read_run(paths: Sequence[str | Path], name: str | None = None) -> RunLog:
    """Read one run; all that is found in the files and folders are attempts at it and are joined.

    Args:
        paths: as of `read_runs`.
        name: of the run; by default that of the first path.

    Raises:
        ReadError: nothing there that can be read, or a table that names several runs.
    """
    given = [Path(path) for path in paths]
    if not given:
        raise ReadError("no files given")
    places = [place for path in given for place in find_places(path)]
    found = [run for place in places for run in _read_place(place)]
    logs = [log for item in found for log in item.logs]
    named = [log.name or "" for log in logs if log.is_split]
    if named:
        raise ReadError(
            f"{', '.join(map(str, given))}: the export holds several runs ({', '.join(named[:8])}): give each a file "
            "of its own to join them; without --join each is a curve of its own"
        )
    plain = [log for log in logs if log.rows is not None]
    if plain and len(logs) > 1:
        raise ReadError(f"{', '.join(map(str, given))}: a table without a column of steps cannot be joined with others")
    name = name or name_of(given[0])
    files = [file for place in places for file in place.files]
    joined = Place(name, files, [folder for place in places for folder in place.validation_folders])
    run = _build(name, joined, logs, [segment for log in logs for segment in log.segments])
    if not run.steps and not plain:
        raise ReadError(f"{', '.join(map(str, given))}: no metrics in {count(len(files), 'file')}")
    return replace(run, notes=(*(note for place in places for note in place.notes), *run.notes))


def _read_place(place: Place, is_alone: bool = True) -> list[_Found]:
    """Runs of one place; files of one place are attempts at one run, unless they name several.

    Where the place is one of several its name begins those that a file tells apart.
    """
    found: dict[str, _Found] = {}
    for file in place.files:
        for log in _read_file(file):
            name, is_named = place.name, bool(log.name and place.takes_names)
            if is_named:
                name = f"{place.name}/{log.name}" if log.is_split and not is_alone else str(log.name)
            found.setdefault(name, _Found(name, place, is_named=is_named)).logs.append(log)
    return list(found.values())


def _read_file(path: Path) -> list[Log]:
    if path.is_dir():
        return mlflow_store.read_mlflow(path)
    if "tfevents" in path.name:
        return event_files.read_events(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ReadError(
            f"{path}: unknown kind of file; give *.jsonl (verl's file logger or flat rows), trainer_state.json, "
            "events.out.tfevents.*, *.wandb, *.csv, *.parquet, or a folder"
        )
    return reader(path)


def _build_all(found: _Found) -> list[RunLog]:
    segments = order_attempts(segment for log in found.logs for segment in log.segments)
    groups = [segments] if found.place.is_one_run else tell_apart(segments)
    if len(groups) <= 1:
        run = _build(found.name, found.place, found.logs, segments)
        return [run] if run.steps or run.is_table else []
    begins = ", ".join(str(min(min(segment.steps) for segment in group)) for group in groups)
    said = f"{found.name} begins {len(groups)} times (at step {begins}): each is a run; --join takes the last"
    quiet = [replace(log, notes=[]) for log in found.logs]
    return [
        _build(f"{found.name}#{i}", found.place, quiet if i > 1 else [Log(notes=[said]), *found.logs], group)
        for i, group in enumerate(groups, 1)
    ]


def _build(name: str, place: Place, logs: list[Log], segments: list[Segment]) -> RunLog:
    notes = list(itertools.chain.from_iterable(log.notes for log in logs))
    table = next((log for log in logs if log.rows is not None), None)
    rows = None if table is None else table.rows
    overruled: dict[str, tuple[int, ...]] = {}
    steps, without = (rows, {}) if rows is not None else take_out_nan(join(segments, notes, overruled))
    faults = {metric: text for log in reversed(logs) for metric, text in log.faults.items()}
    sources = tuple(map(str, place.files))
    return RunLog(
        name,
        steps,
        sources,
        is_table=table is not None,
        places={} if table is None else table.places,
        validation_folders=tuple(place.validation_folders),
        without_value=without,
        overruled=overruled,
        faults=faults,
        notes=tuple(notes),
    )


def _name_apart(runs: list[RunLog]) -> list[RunLog]:
    """Trackers let two runs have one name: the folder or file is added to it."""
    times = Counter(run.name for run in runs)
    return [
        replace(run, name=f"{run.name} ({Path(run.sources[0]).stem})") if times[run.name] > 1 else run for run in runs
    ]


def _leave_out_side_writers(runs: list[RunLog]) -> list[RunLog]:
    """Without runs of a single step beside others: hyperparameters that TensorBoard has in a folder of their own."""
    long = [run for run in runs if len(run.steps) > 1]
    if not long or len(long) == len(runs):
        return runs
    notes = tuple(
        f"{run.name} is left out: it logs step {next(iter(run.steps))} only ({', '.join(run.names()[:3])})"
        for run in runs
        if len(run.steps) <= 1
    )
    return [replace(long[0], notes=(*long[0].notes, *notes)), *long[1:]]
