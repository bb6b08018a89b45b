# SPDX-License-Identifier: Apache-2.0
"""Reader of MLflow's file store: `mlruns/<experiment>/<run>/metrics/<name>`, lines of time, value and step.

verl writes `@` as `_at_` there.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from scalerl_verl.json_lines import split_lines
from scalerl_verl.scaling.logs.files import read_text
from scalerl_verl.scaling.logs.segments import Log, ReadError, split_attempts
from scalerl_verl.scaling.logs.values import LeftOut, read_number, read_step

FACTS = "meta.yaml"
DEPTHS = (FACTS, f"*/{FACTS}", f"*/*/{FACTS}", f"*/*/*/{FACTS}")
"""Of a run's folder, an experiment's, the store, and the folder that holds `mlruns`."""
SYSTEM = "system/"
"""Metrics of the machine, which count steps of their own."""


def find_runs(folder: Path) -> list[Path]:
    """Folders of runs in a store, an experiment or a run, without those that MLflow moved to `.trash`."""
    found = [path.parent for depth in DEPTHS for path in sorted(folder.glob(depth))]
    return [run for run in found if (run / "metrics").is_dir() and ".trash" not in run.parts]


def read_mlflow(run: Path) -> list[Log]:
    """One run's folder: one run, named as in MLflow.

    Raises:
        ReadError: a line of a metric is none of the store.
    """
    facts = _read_facts(run / FACTS)
    name = facts.get("run_name") or _read_tag(run) or run.name
    if facts.get("lifecycle_stage") == "deleted":
        return [Log(name=name, notes=[f"{run}: run {name} left out: it was deleted in MLflow"])]
    # Metrics that are logged together have one time and one step.
    rows: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    left_out = LeftOut()
    for path in sorted((run / "metrics").rglob("*")):
        metric = path.relative_to(run / "metrics").as_posix()
        if not path.is_file() or metric.startswith(SYSTEM):
            continue
        for number, line in enumerate(split_lines(read_text(path)), 1):
            if not line.strip():
                continue
            time, value, step = _read_line(path, number, line)
            if isinstance(step, str):
                left_out.add(step, f"{metric} line {number}")
            else:
                rows[time, step][metric] = value
    began = min((time for time, _ in rows), default=None)
    ordered = [(step, metrics) for (_, step), metrics in sorted(rows.items(), key=lambda row: row[0])]
    segments = split_attempts(ordered, str(run))
    for segment in segments:
        segment.began = None if began is None else began / 1000
    return [Log(segments, name, notes=left_out.notes(str(run)))]


def _read_line(path: Path, number: int, line: str) -> tuple[int, float, int | str]:
    parts = line.split()
    try:
        if len(parts) < 2:
            raise ValueError(f"{len(parts)} part")
        value = read_number(parts[1])
        assert value is not None
        return int(parts[0]), value, read_step(parts[2]) if len(parts) > 2 else 0
    except ValueError as error:
        raise ReadError(f"{path} line {number} is no line of MLflow's store ({error}): time, value and step") from error


def _read_facts(path: Path) -> dict[str, str]:
    """Keys of the first level; MLflow writes each on a line of its own."""
    pairs = [line.partition(":") for line in split_lines(read_text(path)) if not line.startswith((" ", "-", "#"))]
    return {key.strip(): value.strip().strip("'\"") for key, _, value in pairs}


def _read_tag(run: Path) -> str:
    path = run / "tags" / "mlflow.runName"
    return read_text(path).strip() if path.is_file() else ""
