# SPDX-License-Identifier: Apache-2.0
"""Where the runs of a folder lie: which files belong to one run."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scalerl_verl.names import SAMPLER_LOG_NAME
from scalerl_verl.scaling.logs.event_files import PATTERN as EVENTS
from scalerl_verl.scaling.logs.json_logs import is_log
from scalerl_verl.scaling.logs.mlflow_store import find_runs
from scalerl_verl.scaling.logs.segments import COMPUTE_FILE, STEPS_FILE, ReadError
from scalerl_verl.scaling.logs.values import MAX_PLACES, count
from scalerl_verl.scaling.logs.wandb_runs import PATTERN as WANDB

STATE = "trainer_state.json"
NO_LOGS = (COMPUTE_FILE, SAMPLER_LOG_NAME)
"""JSON Lines of ours beside the checkpoints, which have no metrics: nothing is left out with them."""


@dataclass
class Place:
    """Files of one run.

    takes_names: a name that a file gives its run counts. is_one_run: the files are known to be attempts at one run,
    also where one of them begins anew. notes: on what is left out beside the first place of a folder.
    """

    name: str
    files: list[Path]
    validation_folders: list[str] = field(default_factory=list)
    takes_names: bool = False
    is_one_run: bool = False
    notes: list[str] = field(default_factory=list)


def find_places(path: Path) -> list[Place]:
    """Places of runs in a folder, or that of a file.

    Of a folder with several kinds of logs the first of these counts, they mostly hold the same, and a note of the first
    place names the others: JSON Lines (of these
    `STEPS_FILE` alone, if it is there), TensorBoard, W&B, MLflow, a trainer's state, CSV, Parquet.

    Raises:
        ReadError: there is none.
    """
    if not path.exists():
        raise ReadError(f"{path} does not exist")
    places = _find_in_folder(path) if path.is_dir() else [Place(name_of(path), [path], takes_names=True)]
    for place in places:
        folders = [path, *(file.parent for file in place.files)] if path.is_dir() else [path.parent]
        dumps = [folder / "validation" for folder in dict.fromkeys(folders)]
        place.validation_folders = [str(folder) for folder in dumps if folder.is_dir()]
    return places


def name_of(path: Path) -> str:
    """Name of the run of a file or folder: event files and a trainer's state say none, their folder does."""
    if path.is_dir():
        return path.name
    return path.absolute().parent.name if "tfevents" in path.name or path.name == STATE else path.stem


def _find_in_folder(folder: Path) -> list[Place]:
    rows = [path for path in sorted(folder.glob("*.jsonl")) if path.name not in NO_LOGS]
    logs = [path for path in rows if is_log(path)]
    steps = [path for path in logs if path.name == STEPS_FILE]
    states = _states(folder)
    kinds: dict[str, list[Place]] = {
        "JSON Lines": [Place(folder.name, steps, is_one_run=True)] if steps else _by_stem(logs),
        "TensorBoard": _by_folder(folder, sorted(folder.rglob(EVENTS))),
        # `latest-run` is a link to one of the others.
        "W&B": _by_run(sorted({path.resolve() for path in folder.rglob(WANDB)})),
        "MLflow": [Place(run.name, [run], takes_names=True) for run in find_runs(folder)],
        STATE: [Place(folder.name, states[:1], is_one_run=True)] if states else [],
        "CSV": [Place(path.stem, [path], takes_names=True) for path in sorted(folder.glob("*.csv"))],
        "Parquet": [Place(path.stem, [path], takes_names=True) for path in _parquet(folder)],
    }
    kinds = {kind: places for kind, places in kinds.items() if places}
    if not kinds:
        raise ReadError(
            f"{folder} holds no log: expected *.jsonl of verl's file logger (trainer.logger=[file], "
            "VERL_FILE_LOGGER_PATH) or of flat rows, events.out.tfevents.*, run-*.wandb, runs of MLflow, "
            "trainer_state.json, *.csv or *.parquet"
        )
    chosen, *others = kinds
    left_out = [
        (f"of logs of several kinds {chosen} counts, for they mostly hold the same", folder, _files(kinds[kind]))
        for kind in others
    ]
    left_out.append((f"{STEPS_FILE} has every step of all attempts", folder, logs if steps else []))
    left_out.append(("no row of a log stands first in it", folder, [path for path in rows if path not in logs]))
    left_out.append(("the last state holds what earlier ones do", folder, states[1:] if chosen == STATE else []))
    places = kinds[chosen]
    used = _files(places)
    places[0].notes = [
        note for reason, root, files in left_out if (note := _say(reason, root, [f for f in files if f not in used]))
    ]
    return places


def _files(places: Sequence[Place]) -> list[Path]:
    return [file for place in places for file in place.files]


def _say(reason: str, folder: Path, files: Sequence[Path]) -> str:
    """What is left out of a folder, at most `MAX_PLACES` by name; nothing if nothing is."""
    names = [os.path.relpath(file, folder.resolve() if file.is_absolute() else folder) for file in files]
    shown = ", ".join(names[:MAX_PLACES]) + (", ..." if len(names) > MAX_PLACES else "")
    return f"{folder}: {count(len(files), 'file')} left out ({shown}): {reason}" if files else ""


def _parquet(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.parquet"), *folder.glob("*.pq")])


def _by_stem(files: Sequence[Path]) -> list[Place]:
    """A run a file, but `metrics.001.jsonl` and such beside `metrics.jsonl` are earlier attempts at its run."""
    names = {path.name for path in files}
    places: dict[str, Place] = {}
    for path in files:
        earlier = re.fullmatch(r"(.+)\.[^.]+\.jsonl", path.name)
        stem = earlier[1] if earlier and f"{earlier[1]}.jsonl" in names else path.stem
        place = places.setdefault(stem, Place(stem, [], takes_names=True))
        place.files.append(path)
        place.is_one_run = len(place.files) > 1
    for place in places.values():
        # Of attempts that all begin anew the plain name is the last.
        place.files.sort(key=lambda path: (path.stem == place.name, path.name))
    return list(places.values())


def _by_folder(root: Path, files: Sequence[Path]) -> list[Place]:
    places: dict[Path, Place] = {}
    for path in files:
        name = root.name if path.parent == root else path.parent.relative_to(root).as_posix()
        places.setdefault(path.parent, Place(name, [])).files.append(path)
    return list(places.values())


def _by_run(files: Sequence[Path]) -> list[Place]:
    """W&B names the file by the run, and gives a resumed run another folder."""
    places: dict[str, Place] = {}
    for path in files:
        name = path.stem.removeprefix("run-")
        places.setdefault(name, Place(name, [], takes_names=True)).files.append(path)
    return list(places.values())


def _states(folder: Path) -> list[Path]:
    """States of a Hugging Face trainer, the last first; each checkpoint holds that of the earlier ones, too."""
    found = [(re.search(r"-(\d+)$", path.parent.name), path) for path in sorted(folder.glob(f"checkpoint-*/{STATE}"))]
    numbered = sorted(((int(number[1]), path) for number, path in found if number), reverse=True)
    unknown = [path for number, path in found if not number]
    whole = [folder / STATE] if (folder / STATE).is_file() else []
    # One in a folder that says no step may be a copy of any of them.
    return [*whole, *(path for _, path in numbered), *unknown] if whole or numbered else []
