# SPDX-License-Identifier: Apache-2.0
"""Choose compute and score from a run's metrics, by name or by sensible defaults."""

from __future__ import annotations

import difflib
import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from scalerl_verl.json_lines import read_records
from scalerl_verl.scaling.fit.points import Points
from scalerl_verl.scaling.logs.segments import ReadError, RunLog

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
PASS_RATE = "scalerl/validation/pass_rate"
PASS_RATE_TOLERANCE = 1e-6
"""Of two means of the same passes, summed in another order and written with at least seven digits."""
STDERR = "scalerl/validation/stderr"


@dataclass(frozen=True)
class Curve:
    """Score against compute of one run, the validation before training apart.

    x_name, y_name: what was chosen; x_label: for people. steps: of the points. start: score at step 0 (of a table: at
    zero compute), or None; start_stderr: its standard error, if the points have theirs. stderr: of the points, or None.
    prompt_scores: [prompts, points] from validation dumps, or None; start_prompts: [prompts], of the start.
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

    def points(self) -> Points:
        """Checked points, the score before training as that at zero compute.

        Raises:
            FitRefused: the values are no points of a curve.
        """
        if self.start is None:
            return Points.make(self.compute, self.score, self.stderr, self.prompt_scores)
        stderr = None
        if self.stderr is not None and self.start_stderr is not None:
            stderr = (self.start_stderr, *self.stderr)
        prompts = self.prompt_scores
        if prompts is not None:
            # Where the start left no dump its score does not scatter.
            column = np.full(len(prompts), self.start) if self.start_prompts is None else self.start_prompts
            prompts = np.column_stack([column, prompts])
        return Points.make((0.0, *self.compute), (self.start, *self.score), stderr, prompts)


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
    y_name = _find_score(run, y)
    score = run.series(y_name)
    x_name, label, compute = _find_compute(run, x)
    stderr = run.series(STDERR) if y_name == PASS_RATE else {}
    start = score.get(0)
    steps = [step for step in score if step > 0]
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
    )


def _choose_columns(run: RunLog, x: str | None, y: str | None) -> Curve:
    names = run.names()
    if not run.steps:
        raise ReadError(f"{run.sources[0]} holds a header and no rows")
    x_name = x or next((name for name in ("compute", *X_NAMES) if name in names), "compute")
    y_name = y or "score"
    for name, option in ((x_name, "--x"), (y_name, "--y")):
        if name not in names:
            raise ReadError(
                f"{run.sources[0]} has no column {name}; it has {', '.join(names)}: choose compute with --x and score "
                f"with --y ({option} is missing), or name them compute,score[,stderr]"
            )
    rows = [run.steps[i] for i in sorted(run.steps)]
    weighted = "stderr" in names and y_name == "score"
    # Two rows at zero compute stay rows: they are refused as two values for one compute.
    before = [row for row in rows if row[x_name] == 0]
    start = before[0] if len(before) == 1 else None
    rows = [row for row in rows if row is not start]
    return Curve(
        run.name,
        x_name,
        X_NAMES.get(x_name, x_name),
        y_name,
        tuple(range(len(rows))),
        tuple(row[x_name] for row in rows),
        tuple(row[y_name] for row in rows),
        tuple(row["stderr"] for row in rows) if weighted else None,
        None if start is None else start[y_name],
        start_stderr=start["stderr"] if weighted and start is not None else None,
    )


def _find_score(run: RunLog, y: str | None) -> str:
    names = run.names()
    if y is None:
        if PASS_RATE in names:
            return PASS_RATE
        core = [name for name in names if name.startswith("val-core/") and "/mean@" in name]
        if len(core) == 1:
            return core[0]
        if core:
            raise ReadError(f"{run.name} has several validation scores: choose one with --y: {', '.join(core)}")
        raise ReadError(
            f"{run.name} logs no validation score (scalerl/validation/pass_rate or val-core/.../mean@N): set "
            "trainer.test_freq, or choose another metric with --y"
        )
    return _match(run, y, "--y")


def _match(run: RunLog, wanted: str, option: str) -> str:
    names = run.names()
    if wanted in names:
        return wanted
    containing = [name for name in names if wanted in name]
    if len(containing) == 1:
        return containing[0]
    if containing:
        shown = ", ".join(containing[:8]) + (", ..." if len(containing) > 8 else "")
        raise ReadError(f"{option} {wanted} fits {len(containing)} metrics of {run.name}: {shown}")
    close = difflib.get_close_matches(wanted, names, 5, 0.4) or names[:8]
    raise ReadError(f"{run.name} has no metric {wanted}; did you mean {', '.join(close)}?")


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
                f"{run.name} logs no {X_NAMES[x]}: they come under scalerl/compute/ in runs that use a name of "
                "scalerl_verl; steps are always there (--x steps)"
            )
        return x, X_NAMES[x], found
    name = _match(run, x or "", "--x")
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


def read_prompt_scores(run: RunLog, steps: list[int]) -> np.ndarray | None:
    """[prompts, steps] pass rates from verl's validation dumps, by the default definition of a pass.

    None unless every step has the same prompts and the pass rate that the run logged, if it did: a run with a
    definition of its own is not judged by another one.
    """
    by_step = []
    logged = run.series(PASS_RATE)
    for step in steps:
        path = next((p for folder in run.validation_folders if (p := Path(folder) / f"{step}.jsonl").exists()), None)
        if path is None:
            return None
        means = _prompt_means(path)
        if step in logged and abs(float(np.mean(list(means.values()))) - logged[step]) > PASS_RATE_TOLERANCE:
            return None
        by_step.append(means)
    if not by_step or any(set(means) != set(by_step[0]) for means in by_step):
        return None
    return np.array([[means[prompt] for means in by_step] for prompt in sorted(by_step[0])])


def _prompt_means(path: Path) -> dict[tuple[str, str], float]:
    """Pass rate of each prompt of a dump; the same text with another ground truth is another prompt."""
    # Its package needs PyTorch, which a machine that only fits curves may not have.
    from scalerl_verl.advantage.passed import PassRule

    rows = read_records(path)
    try:
        passed = PassRule().judge([row["score"] for row in rows], rows)
    except ValueError as error:
        raise ReadError(f"{path}: {error}") from error
    means: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row, value in zip(rows, passed.tolist(), strict=True):
        means[row["input"], json.dumps(row.get("gts"), sort_keys=True)].append(value)
    return {prompt: float(np.mean(values)) for prompt, values in means.items()}
