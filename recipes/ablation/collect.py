# SPDX-License-Identifier: Apache-2.0
"""What finished runs measured, as one JSONL for tables, and a folder for each run that `scalerl fit` reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recipes.ablation.runner import run_folder
from recipes.ablation.spec import Run
from recipes.launch.folder import Paths, state_of
from scalerl_verl.scaling.logs.reading import read_run

PREFIXES = ("scalerl/compute/", "scalerl/validation/")


def collect(runs: Sequence[Run], out: Path) -> tuple[Path, int]:
    """Write `results.jsonl` and `curves/<group>.<name>.seedN.jsonl`; returns the former and the number of runs in it.

    The attempts of a run are joined as `scalerl fit` joins them. `results.jsonl` has a line for every validation:
    run, group, name, seed, step, and the metrics below `PREFIXES`.
    """
    curves = out / "curves"
    shutil.rmtree(curves, ignore_errors=True)
    curves.mkdir(parents=True)
    num_runs, lines = 0, []
    for run in runs:
        folder = run_folder(out, run)
        if state_of(Paths(folder)) != "finished":
            continue
        log = read_run([folder / "run"], run.name)
        rows = [{"step": step, "data": metrics} for step, metrics in sorted(log.steps.items())]
        _write(curves / f"{run.name.replace('/', '.')}.jsonl", map(json.dumps, rows))
        lines += [json.dumps(row, sort_keys=True) for row in _validations(run, rows)]
        num_runs += 1
    _write(out / "results.jsonl", lines)
    return out / "results.jsonl", num_runs


def _validations(run: Run, rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    group, name, _ = run.name.split("/")
    for row in rows:
        found = {key: value for key, value in row["data"].items() if key.startswith(PREFIXES)}
        if any(key.startswith("scalerl/validation/") for key in found):
            yield {"run": run.name, "group": group, "name": name, "seed": run.seed, "step": row["step"], **found}


def _write(path: Path, lines: Any) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
