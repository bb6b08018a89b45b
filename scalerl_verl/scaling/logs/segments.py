# SPDX-License-Identifier: Apache-2.0
"""Logged metrics of one run, in pieces: a resumed run leaves several logs, whose steps overlap."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from scalerl_verl.errors import ScaleRLError
from scalerl_verl.scaling.logs.steps import find_missing, name_steps

STEPS_FILE = "scalerl_steps.jsonl"
"""Written beside the checkpoints, over all attempts at a run."""
Steps = dict[int, dict[str, float]]


class ReadError(ScaleRLError, ValueError):
    """A log cannot be read or does not hold what was asked for; says what to do."""


@dataclass
class Segment:
    """What one attempt at a run logged: step -> metrics, and when it began if the log says (Unix seconds)."""

    steps: Steps
    began: float | None = None
    source: str = ""


@dataclass(frozen=True)
class RunLog:
    """One run: its name, joined metrics by step, and where they come from.

    `is_table`: the source was a plain table, whose columns are compute and score, not a log of training steps.
    """

    name: str
    steps: Steps
    sources: tuple[str, ...] = ()
    is_table: bool = False
    validation_folders: tuple[str, ...] = field(default=())

    def names(self) -> list[str]:
        """Every metric of the run, sorted."""
        return sorted({name for metrics in self.steps.values() for name in metrics})

    def describe_missing(self) -> str | None:
        """Say which training steps the log lacks, if it is one of every step; None if none."""
        missing = [] if self.is_table else find_missing(self.steps)
        if not missing:
            return None
        said = f"{self.name} logs steps up to {max(self.steps)} without {name_steps(missing)}: "
        if STEPS_FILE in [Path(source).name for source in self.sources]:
            return (
                f"{said}{STEPS_FILE} has no rows of them (older versions wrote none). If another log has, such as that "
                f"of verl's file logger, give both files to --join"
            )
        return (
            f"{said}a run that was killed and resumed loses steps in verl's logs. {STEPS_FILE} beside the checkpoints "
            "has those of all attempts; several logs of a run are joined by --join"
        )

    def series(self, name: str) -> dict[int, float]:
        """Step -> value of one metric, in order of steps."""
        return {step: self.steps[step][name] for step in sorted(self.steps) if name in self.steps[step]}


def split_attempts(
    rows: Iterable[tuple[int, dict[str, float]]], source: str, began: float | None = None
) -> list[Segment]:
    """Rows of one log in the order they were written; where the step falls, another attempt had begun."""
    segments: list[Segment] = []
    last = None
    for step, metrics in rows:
        if last is None or step < last:
            segments.append(Segment({}, began if not segments else None, source))
        segments[-1].steps.setdefault(step, {}).update(metrics)
        last = step
    return segments


def join(segments: list[Segment]) -> Steps:
    """Join attempts at one run: what an attempt logged beyond the checkpoint that the next one resumed is dropped.

    Order: by the time they began where all logs say it, else by their first step. A later attempt begins with a
    validation of the checkpoint's own step or with the step after it.
    """
    if all(segment.began is not None for segment in segments):
        ordered = sorted(segments, key=lambda segment: segment.began or 0.0)
    else:
        ordered = sorted(segments, key=lambda segment: min(segment.steps, default=0))
    joined: Steps = {}
    for segment in ordered:
        if not segment.steps:
            continue
        first = min(segment.steps)
        joined = {step: metrics for step, metrics in joined.items() if step <= first}
        for step, metrics in segment.steps.items():
            joined.setdefault(step, {}).update(metrics)
    return dict(sorted(joined.items()))
