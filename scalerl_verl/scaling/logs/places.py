# SPDX-License-Identifier: Apache-2.0
"""Where the runs of a folder lie: which files belong to one run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scalerl_verl.scaling.logs.event_files import PATTERN as EVENTS
from scalerl_verl.scaling.logs.json_logs import is_log
from scalerl_verl.scaling.logs.mlflow_store import find_runs
from scalerl_verl.scaling.logs.segments import STEPS_FILE, ReadError
from scalerl_verl.scaling.logs.wandb_runs import PATTERN as WANDB

STATE = "trainer_state.json"


@dataclass
class Place:
    """Files of one run.

    takes_names: a name that a file gives its run counts. is_one_run: the files are known to be attempts at one run,
    also where one of them begins anew.
    """

    name: str
    files: list[Path]
    validation_folders: list[str] = field(default_factory=list)
    takes_names: bool = False
    is_one_run: bool = False
    notes: list[str] = field(default_factory=list)


def find_places(path: Path) -> list[Place]:
    """Places of runs in a folder, or that of a file.

    Of a folder with several kinds of logs the first of these counts, they hold the same: JSON Lines (of these
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
    jsonl = [path for path in sorted(folder.glob("*.jsonl")) if is_log(path)]
    for found in (
        [Place(folder.name, [path], is_one_run=True) for path in jsonl if path.name == STEPS_FILE],
        _by_stem(jsonl),
        _by_folder(folder, sorted(folder.rglob(EVENTS))),
        # `latest-run` is a link to one of the others.
        _by_run(sorted({path.resolve() for path in folder.rglob(WANDB)})),
        [Place(run.name, [run], takes_names=True) for run in find_runs(folder)],
        _last_state(folder),
        [Place(path.stem, [path], takes_names=True) for path in sorted(folder.glob("*.csv"))],
        [Place(path.stem, [path], takes_names=True) for path in _parquet(folder)],
    ):
        if found:
            return found
    raise ReadError(
        f"{folder} holds no log: expected *.jsonl of verl's file logger (trainer.logger=[file], "
        "VERL_FILE_LOGGER_PATH) or of flat rows, events.out.tfevents.*, run-*.wandb, runs of MLflow, "
        "trainer_state.json, *.csv or *.parquet"
    )


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


def _last_state(folder: Path) -> list[Place]:
    """The state of a Hugging Face trainer; each checkpoint holds that of the earlier ones, too."""
    states = [folder / STATE] if (folder / STATE).is_file() else []
    if not states:
        found = [(re.search(r"-(\d+)$", path.parent.name), path) for path in folder.glob(f"checkpoint-*/{STATE}")]
        numbered = [(int(number[1]), path) for number, path in found if number]
        states = [max(numbered)[1]] if numbered else []
    return [Place(folder.name, [path], is_one_run=True) for path in states]
