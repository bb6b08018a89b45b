# SPDX-License-Identifier: Apache-2.0
"""The metrics of every step of a run, whichever attempt trained it, in the format of verl's file logger.

verl marks a checkpoint as done before it sends the weights, validates and logs the step: a run that is killed in
between has trained a step that no tracker knows. And its file logger begins its file anew when a run is resumed.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalerl_verl.bookkeeping import bookkeeping
from scalerl_verl.json_lines import append_line, read_lines, replace_file, set_aside
from scalerl_verl.scaling.logs.segments import STEPS_FILE
from scalerl_verl.scaling.logs.steps import name_steps

STEP_FILE = "scalerl_step.json"
_NEVER = 2**62
logger = logging.getLogger(__name__)


class StepLog:
    """Writes a row a step to ``scalerl_steps.jsonl`` beside the checkpoints.

    The row of a step with a checkpoint is in the checkpoint's folder before the checkpoint counts as done, with what is
    known by then; a run that is resumed takes it from there if the step's own row was never written. Rows of steps that
    a resumed run repeats go to ``scalerl_steps.jsonl.superseded``. A disk that is full ends no training: rows wait.

    Args:
        folder: ``trainer.default_local_dir``.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / STEPS_FILE
        self._last: int | None = None
        self._waiting: list[tuple[int, dict[str, Any]]] = []

    @bookkeeping(STEPS_FILE, "It may lack rows, or hold some of steps that are trained again")
    def restore(self, checkpoint_folder: str | None, step: int) -> None:
        """Continue after the step of a checkpoint, or begin anew (None and 0); says which steps have no row."""
        if checkpoint_folder is None:
            if self.path.exists():
                set_aside(self.path, lambda line: True)
            return
        other = Path(checkpoint_folder).absolute().parent / STEPS_FILE
        if other.exists() and not (self.path.exists() and other.samefile(self.path)):
            self._adopt(other, step)
        rows = self._keep_rows(self.path, step)
        self._last = rows[-1] if rows else None
        if step not in rows:
            self._take_from(Path(checkpoint_folder) / STEP_FILE, step)
            rows += [step] * (self._last == step)
        missing = set(range(1, step + 1)) - set(rows)
        if missing:
            logger.warning(
                "%s has no metrics of step %s, although this checkpoint was trained by them. Curves go on without "
                "them. A tracker or an older log of the run may have them.",
                self.path,
                name_steps(missing),
            )

    def _adopt(self, other: Path, step: int) -> None:
        """The run that the checkpoint comes from trained its steps, whatever this folder has of the same numbers."""
        theirs = [line for line in read_lines(other) if _step_of(line) <= step]
        if self.path.exists():
            set_aside(self.path, lambda line: line not in theirs)
        replace_file(self.path, b"".join(theirs))

    def _keep_rows(self, path: Path, step: int) -> list[int]:
        """Take out what lies beyond ``step``, and a line that was cut; returns the steps of the others."""
        if not path.exists():
            return []
        return [_step_of(line) for line in set_aside(path, lambda line: _step_of(line) > step)]

    def _take_from(self, path: Path, step: int) -> None:
        try:
            row = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return  # saved by an earlier version, or without scalerl_verl: the step is named as missing
        logger.warning(
            "Step %d was trained and saved, and the run ended before the step was logged. %s has what was known of it "
            "before the checkpoint. No tracker has the step or a validation of it. trainer.val_before_train=True "
            "validates these weights now.",
            step,
            self.path,
        )
        self.write(step, row["data"])

    @bookkeeping(STEP_FILE, "A run that ends before it logs this step has no metrics of it")
    def keep(self, checkpoint_folder: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Put the row of a step into its checkpoint's folder, and all rows so far on the disk."""
        replace_file(Path(checkpoint_folder) / STEP_FILE, _encode(step, _numbers(metrics)))
        if self.path.exists():
            with self.path.open("ab") as stream:
                os.fsync(stream.fileno())

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the row of a step; what the last row has of the same step stays, and is completed."""
        self._waiting.append((step, _numbers(metrics)))
        with bookkeeping(STEPS_FILE, "Its rows wait until it can be"):
            while self._waiting:
                self._write(*self._waiting[0])
                del self._waiting[0]

    def _write(self, step: int, data: dict[str, Any]) -> None:
        if step == self._last:
            lines = read_lines(self.path) if self.path.exists() else []
            data = {**data, **(json.loads(lines[-1])["data"] if lines else {})}
            replace_file(self.path, b"".join([*lines[:-1], _encode(step, data) + b"\n"]))
        else:
            append_line(self.path, _encode(step, data))
        self._last = step


def _encode(step: int, data: Mapping[str, Any]) -> bytes:
    return json.dumps({"step": step, "data": data}).encode()


def _step_of(line: bytes) -> int:
    """Step of a line; one that was cut off belongs to no step that a checkpoint knows."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return _NEVER


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers among the metrics, as JSON has them; as in verl's file logger one that is not finite is null."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        plain = value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value
        if isinstance(plain, int | float) and not isinstance(plain, bool):
            found[name] = plain if math.isfinite(plain) else None
    return found
