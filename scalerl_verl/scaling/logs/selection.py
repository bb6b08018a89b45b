# SPDX-License-Identifier: Apache-2.0
"""Choose compute and score from a run's metrics, by name or by sensible defaults."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from scalerl_verl.scaling.fit.points import Points
from scalerl_verl.scaling.logs.metric_names import CORE, PASS_RATE, SCORE, find_score, list_names, match
from scalerl_verl.scaling.logs.prompt_scores import read_prompt_scores
from scalerl_verl.scaling.logs.segments import ReadError, RunLog
from scalerl_verl.scaling.logs.steps import MAX_NAMED, name_steps
from scalerl_verl.scaling.logs.tables import STEP_COLUMNS
from scalerl_verl.scaling.logs.values import count

X_NAMES = {
    "gpu_hours": "GPU-hours",
    "tokens": "generated tokens",
    "trained_tokens": "trained tokens",
    "flops": "model FLOPs",
    "steps": "steps",
}
_LEDGER = {
    "gpu_hours": "scalerl/compute/gpu_hours",
    "tokens": "scalerl/compute/generated_tokens",
    "trained_tokens": "scalerl/compute/trained_tokens",
    "flops": "scalerl/compute/model_flops",
}
STDERR = "scalerl/validation/stderr"
TABLES = (".csv", ".parquet", ".pq")


@dataclass(frozen=True)
class Curve:
    """Score against compute of one run, the validation before training apart.

    x_name, y_name: what was chosen; x_label: for people. steps: of the points. start: score at step 0 (of a table: at
    zero compute), or None; start_stderr: its standard error, if the points have theirs. stderr: of the points, or None.
    prompt_scores: [prompts, points] from validation dumps, or None; start_prompts: [prompts], of the start. notes: what
    was left out of the run and of its points, a sentence each. places: where the points stand in their source, the
    start first if there is one.
    """

    name: str
    x_name: str
    x_label: str
    y_name: str
    steps: tuple[int, ...]
    compute: tuple[float, ...]
    score: tuple[float, ...]
    stderr: tuple[float, ...] | None
    start: float | None
    prompt_scores: np.ndarray | None = field(default=None, repr=False)
    start_stderr: float | None = None
    start_prompts: np.ndarray | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()
    places: tuple[str, ...] = ()

    def points(self) -> Points:
        """Checked points, the score before training as that at zero compute.

        Raises:
            FitRefused: the values are no points of a curve.
        """
        if self.start is None:
            return Points.make(self.compute, self.score, self.stderr, self.prompt_scores, self.places)
        stderr = None
        if self.stderr is not None and self.start_stderr is not None:
            stderr = (self.start_stderr, *self.stderr)
        prompts = self.prompt_scores
        if prompts is not None:
            # Where the start left no dump its score does not scatter.
            column = np.full(len(prompts), self.start) if self.start_prompts is None else self.start_prompts
            prompts = np.column_stack([column, prompts])
        return Points.make((0.0, *self.compute), (self.start, *self.score), stderr, prompts, self.places)


def choose_curve(run: RunLog, x: str | None = None, y: str | None = None) -> Curve:
    """Choose x and y of a run.

    Args:
        run: as read.
        x: `gpu_hours`, `tokens`, `trained_tokens`, `flops`, `steps`, or the name of a metric (a column). Default: the
            first of gpu_hours, tokens and steps that the run has; of a table the column compute, else one so named.
        y: name of the score or a part of it that only one metric has. Default: scalerl's pass rate, else verl's only
            `val-core/.../mean@N`.

    Raises:
        ReadError: no such metric, or several.
    """
    if run.is_table:
        return _choose_columns(run, x, y)
    y_name = find_score(run, y)
    x_name, label, compute = _find_compute(run, x)
    x_metric = _LEDGER.get(x_name, x_name)
    _check(run, x_name, x_metric, y_name)
    score, notes = _leave_out(run, x_metric, compute, y_name)
    stderr = run.series(STDERR) if y_name == PASS_RATE else {}
    start = score.get(0)
    steps = [step for step in score if step > 0]
    if not steps and run.without_value.get(y_name):
        raise ReadError(f"{run.name}: every value of {y_name} is NaN, null or empty: choose another score with --y")
    missing = [step for step in steps if step not in compute]
    if missing:
        raise ReadError(f"{run.name}: {y_name} is logged at step {missing[0]}, {x_name} is not; choose another x")
    seen = steps if start is None else [0, *steps]
    usable = bool(stderr) and all(step in stderr and math.isfinite(stderr[step]) for step in seen)
    prompts = read_prompt_scores(run, seen) if y is None else None
    start_prompts = None
    if prompts is not None and start is not None:
        start_prompts, prompts = prompts[:, 0], prompts[:, 1:]
    elif y is None and start is not None:
        prompts = read_prompt_scores(run, steps)
    return Curve(
        run.name,
        x_name,
        label,
        y_name,
        tuple(steps),
        tuple(compute[step] for step in steps),
        tuple(score[step] for step in steps),
        tuple(stderr[step] for step in steps) if usable else None,
        start,
        prompts,
        stderr[0] if usable and start is not None else None,
        start_prompts,
        (*run.notes, *notes),
        tuple(f"step {step}" for step in seen),
    )


def _check(run: RunLog, *names: str) -> None:
    for name in names:
        if name in run.faults:
            raise ReadError(run.faults[name])


def _leave_out(
    run: RunLog, x_metric: str, compute: dict[int, float], y_name: str
) -> tuple[dict[int, float], list[str]]:
    """The score without points that have none or no compute because it was logged as NaN; a sentence for each kind."""
    score = run.series(y_name)
    notes = []
    lost = [step for step in run.without_value.get(y_name, ()) if step not in score]
    if lost:
        notes.append(_say(run, lost, y_name))
    lost = [step for step in run.without_value.get(x_metric, ()) if step in score and step not in compute]
    if lost:
        notes.append(_say(run, lost, x_metric))
    for name in (x_metric, y_name):
        again = sorted(set(run.overruled.get(name, ())) & score.keys())
        if again:
            values, shown = count(len(again), "value"), name_steps(again, MAX_NAMED)
            notes.append(f"{run.name}: {values} of {name} left out: a later one of the same step counts (step {shown})")
        score = {step: value for step, value in score.items() if step not in lost}
    return score, notes


def _say(run: RunLog, steps: list[int], name: str) -> str:
    points, shown = count(len(steps), "point"), name_steps(steps, MAX_NAMED)
    return f"{run.name}: {points} left out: {name} is NaN, null or empty at step {shown}"


def _choose_columns(run: RunLog, x: str | None, y: str | None) -> Curve:
    names = run.names()
    if not run.steps:
        what = "a header and no rows" if Path(run.sources[0]).suffix in TABLES else "no rows"
        raise ReadError(f"{run.sources[0]} holds {what}")
    x_name, x_column = _column_of_compute(run, x)
    y_name = _column_of_score(run, y)
    _check(run, x_column, y_name)
    for name, option in ((x_column, "--x"), (y_name, "--y")):
        if name not in names:
            raise ReadError(
                f"{run.sources[0]} has no column {name}; it has {list_names(names, name)}: choose compute "
                f"with --x and score with --y ({option} is missing), or name them compute,score[,stderr]"
            )
    stderr = next((s for s, of in (("stderr", SCORE), (STDERR, PASS_RATE)) if s in names and y_name == of), None)
    if stderr is not None:
        _check(run, stderr)
    rows = {i: run.steps[i] for i in sorted(run.steps)}
    notes = list(run.notes)
    for name in (y_name, x_column):
        lost = [i for i, row in rows.items() if math.isnan(row[name])]
        rows = {i: row for i, row in rows.items() if i not in lost}
        if lost:
            notes.append(f"{run.name}: {count(len(lost), 'point')} left out: {name} is NaN, null or empty")
    if not rows:
        raise ReadError(f"{run.name}: no row has a number of both {x_column} and {y_name}")
    # Two rows at zero compute stay rows: they are refused as two values for one compute.
    before = [i for i, row in rows.items() if row[x_column] == 0]
    start = rows.pop(before[0]) if len(before) == 1 else None
    return Curve(
        run.name,
        x_name,
        X_NAMES.get(x_name, x_name),
        y_name,
        tuple(range(len(rows))),
        tuple(row[x_column] for row in rows.values()),
        tuple(row[y_name] for row in rows.values()),
        None if stderr is None else tuple(row[stderr] for row in rows.values()),
        None if start is None else start[y_name],
        start_stderr=None if stderr is None or start is None else start[stderr],
        notes=tuple(notes),
        places=tuple(run.places.get(i, "") for i in ([] if start is None else before) + list(rows)),
    )


def _column_of_compute(run: RunLog, x: str | None) -> tuple[str, str]:
    """What `--x` asks for, and the column of a table that has it: so named, or named as the ledger does."""
    names = run.names()
    for choice in ("compute", *X_NAMES) if x is None else (x,):
        for column in (choice, _LEDGER.get(choice, choice)):
            if column in names:
                return choice, column
    if x is None or x in X_NAMES:
        return x or "compute", x or "compute"
    name = match(run, x, "--x")
    return name, name


def _column_of_score(run: RunLog, y: str | None) -> str:
    """The column of a table that `--y` names, or a part of it; by default `score`, else what scalerl and verl log."""
    if y is not None:
        return match(run, y, "--y")
    names = run.names()
    known = [SCORE, PASS_RATE, *(name for name in names if CORE.match(name))]
    return next((name for name in known[:2] if name in names), known[2] if len(known) == 3 else SCORE)


def _find_compute(run: RunLog, x: str | None) -> tuple[str, str, dict[int, float]]:
    if x is None:
        for choice in ("gpu_hours", "tokens", "steps"):
            found = _compute_of(run, choice)
            if found:
                return choice, X_NAMES[choice], found
    if x in X_NAMES:
        found = _compute_of(run, x)
        if not found:
            raise ReadError(
                f"{run.name} logs no {X_NAMES[x]}: runs that use a name of scalerl_verl have them under "
                "scalerl/compute/; take another metric of the log, or its steps (--x steps), which are always there"
            )
        return x, X_NAMES[x], found
    if x in STEP_COLUMNS and x not in run.names():  # the column that numbers the rows is no metric of its own
        return _find_compute(run, "steps")
    name = match(run, x or "", "--x")
    return name, name, run.series(name)


def _compute_of(run: RunLog, choice: str) -> dict[int, float]:
    """Compute at every step: from the ledger, else summed from what verl and scalerl_verl log at each step."""
    if choice == "steps":
        return {step: float(step) for step in run.steps}
    for name in (_LEDGER[choice], choice):  # a table may name its columns so
        if run.series(name):
            return run.series(name)
    rules: dict[str, Callable[[dict[str, float]], float | None]] = {"gpu_hours": _gpu_hours, "tokens": _tokens}
    return _accumulate(run, rules[choice]) if choice in rules else {}


def _gpu_hours(metrics: dict[str, float]) -> float | None:
    """verl's throughput is tokens / (seconds x GPUs): the quotient gives GPU-seconds of the step."""
    tokens, throughput = metrics.get("perf/total_num_tokens"), metrics.get("perf/throughput")
    return tokens / throughput / 3600 if tokens and throughput else None


def _tokens(metrics: dict[str, float]) -> float | None:
    return metrics.get("scalerl/data/generated_tokens_sum")


def _accumulate(run: RunLog, rule: Callable[[dict[str, float]], float | None]) -> dict[int, float]:
    """Running sum over steps; nothing if a step lacks it, for then the sum would be too small."""
    last = max(run.steps, default=0)
    total, found = 0.0, {0: 0.0}
    for step in range(1, last + 1):
        value = rule(run.steps.get(step, {}))
        if value is None:
            return {}
        total += value
        found[step] = total
    return found if last else {}
