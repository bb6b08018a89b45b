# SPDX-License-Identifier: Apache-2.0
"""Logged metrics of one run, in pieces: a resumed run leaves several logs, whose steps overlap."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scalerl_verl.errors import ScaleRLError
from scalerl_verl.scaling.logs.steps import MAX_NAMED, find_missing, name_steps
from scalerl_verl.scaling.logs.values import count

STEPS_FILE = "scalerl_steps.jsonl"
"""Written beside the checkpoints, over all attempts at a run."""
COMPUTE_FILE = "scalerl_compute.jsonl"
"""Beside it: what a run has spent, which every row of a log has, too."""
Steps = dict[int, dict[str, float]]


class ReadError(ScaleRLError, ValueError):
    """A log cannot be read or does not hold what was asked for; says what to do."""


@dataclass
class Segment:
    """What one attempt at a run logged: step -> metrics, and when it began if the log says (Unix seconds).

    A metric that was logged as NaN is nan here. overruled: metric -> steps at which a later value took another's place.
    """

    steps: Steps
    began: float | None = None
    source: str = ""
    overruled: dict[str, list[int]] = field(default_factory=dict)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a row; of two values at one step the later counts."""
        known = self.steps.setdefault(step, {})
        for name in differ(known, metrics):
            self.overruled.setdefault(name, []).append(step)
        known.update(metrics)


@dataclass
class Log:
    """What a reader found of one run in one file.

    name: of the run, where the file holds several or names it. segments: in the order they were written. rows: of a
    plain table without steps instead, places: where each row stands in the file. faults: metric -> why its values
    cannot be used. notes: what was left out. is_split: the file tells its runs apart by name.
    """

    segments: list[Segment] = field(default_factory=list)
    name: str | None = None
    rows: Steps | None = None
    places: Mapping[int, str] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_split: bool = False


@dataclass(frozen=True)
class RunLog:
    """One run: its name, joined metrics by step, and where they come from.

    `is_table`: the source was a plain table, whose columns are compute and score, not a log of training steps.
    `places`: where the rows of a table stand in its file.
    `without_value`: metric -> steps at which it was logged as NaN. `overruled`: metric -> steps at which a later value
    took another's place. `faults`: metric -> why it cannot be used. `notes`: sentences on what was left out or joined.
    """

    name: str
    steps: Steps
    sources: tuple[str, ...] = ()
    is_table: bool = False
    places: Mapping[int, str] = field(default_factory=dict)
    validation_folders: tuple[str, ...] = field(default=())
    without_value: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    overruled: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """Every metric of the run, sorted."""
        return sorted({name for metrics in self.steps.values() for name in metrics}.union(self.without_value))

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


def differ(old: Mapping[str, float], new: Mapping[str, float]) -> list[str]:
    """Metrics that have another value in each."""
    return [
        name
        for name, value in new.items()
        if name in old and old[name] != value and not (math.isnan(old[name]) and math.isnan(value))
    ]


def split_attempts(
    rows: Iterable[tuple[int, dict[str, float]]], source: str, began: float | None = None
) -> list[Segment]:
    """Rows of one log in the order they were written; where the step falls, another attempt had begun.

    Rows that contradict each other nowhere are one attempt in whatever order they stand. Of two rows of one step that
    follow each other the later counts where they do.
    """
    listed = list(rows)
    merged: Steps = {}
    for step, metrics in listed:
        if differ(merged.setdefault(step, {}), metrics):
            break
        merged[step].update(metrics)
    else:
        return [Segment(dict(sorted(merged.items())), began, source)] if merged else []
    segments: list[Segment] = []
    last = None
    for step, metrics in listed:
        if last is None or step < last:
            segments.append(Segment({}, began if not segments else None, source))
        segments[-1].add(step, metrics)
        last = step
    return segments


def order_attempts(segments: Iterable[Segment]) -> list[Segment]:
    """As written where one log has all, else by the time they began where all logs say it, else by their first step."""
    found = [segment for segment in segments if segment.steps]
    if len({segment.source for segment in found}) == 1 and found[0].source:
        return found
    if all(segment.began is not None for segment in found):
        return sorted(found, key=lambda segment: segment.began or 0.0)
    return sorted(found, key=lambda segment: min(segment.steps))


def tell_apart(segments: list[Segment]) -> list[list[Segment]]:
    """Attempts run by run: one that begins no later than the run before it did is another run, not its continuation."""
    runs: list[list[Segment]] = []
    for segment in segments:
        if not segment.steps:
            continue
        if not runs or min(segment.steps) <= min(runs[-1][0].steps):
            runs.append([])
        runs[-1].append(segment)
    return runs


def join(
    segments: list[Segment], notes: list[str] | None = None, overruled: dict[str, tuple[int, ...]] | None = None
) -> Steps:
    """Join attempts at one run: what an attempt logged beyond the checkpoint that the next one resumed is dropped.

    A later attempt begins with a validation of the checkpoint's own step or with the step after it. Takes the order of
    `order_attempts`; `notes` gets a sentence for every attempt that loses steps, `overruled` what `RunLog` has.
    """
    joined = Segment({})
    owner: dict[int, str] = {}
    for segment in order_attempts(segments):
        first = min(segment.steps)
        lost = sorted(step for step in joined.steps if step > first) if notes is not None else []
        for source in dict.fromkeys(owner[step] for step in lost):
            own = [step for step in lost if owner[step] == source]
            said = f"{count(len(own), 'step')} left out ({name_steps(own, MAX_NAMED)})"
            notes.append(f"{source or 'an attempt'}: {said}: a later attempt began at step {first}")  # type: ignore[union-attr]
        joined.steps = {step: metrics for step, metrics in joined.steps.items() if step <= first}
        for step, metrics in segment.steps.items():
            joined.add(step, metrics)
            owner[step] = segment.source
        for name, steps in segment.overruled.items():
            joined.overruled.setdefault(name, []).extend(steps)
    if overruled is not None:
        overruled |= {name: tuple(sorted(set(steps) & joined.steps.keys())) for name, steps in joined.overruled.items()}
    return dict(sorted(joined.steps.items()))


def take_out_nan(steps: Steps) -> tuple[Steps, dict[str, tuple[int, ...]]]:
    """The steps with their numbers, and metric -> steps at which it was logged as NaN."""
    without: dict[str, list[int]] = {}
    found: Steps = {}
    for step, metrics in steps.items():
        found[step] = {}
        for name, value in metrics.items():
            if math.isnan(value):
                without.setdefault(name, []).append(step)
            else:
                found[step][name] = value
    return found, {name: tuple(places) for name, places in without.items()}
