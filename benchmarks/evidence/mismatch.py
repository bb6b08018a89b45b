# SPDX-License-Identifier: Apache-2.0
"""The recorded runs through verl, and the table of the FP32 head's mismatch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.evidence.recipes import geometric
from benchmarks.rows import commits_text, read_rows, versions_text

Row = dict[str, Any]
NOT_YET = "Not recorded yet: `python -m benchmarks.evidence.record`."
MISMATCH = {"log_ratio_abs_mean": "mean abs. log-ratio of a token", "k3_kl": "k3 KL"}


def runs_named(name: str, *, is_gpu: bool) -> dict[int, Row]:
    """Rows of one name by seed, the newest of each that was made on a GPU, or of each that was made on a processor."""
    return {
        row["case"]["seed"]: row for row in read_rows("evidence") if row["impl"] == name and ("driver" in row) == is_gpu
    }


def mismatch_table() -> str:
    """Trainer against generator with and without the FP32 head, over the steps that both runs of a seed have."""
    on, off = (runs_named(name, is_gpu=True) for name in ("tiny_gpu", "fp32_head_off"))
    means = {name: _means_by_seed(on, off, name) for name in MISMATCH}
    if not all(means.values()):
        return NOT_YET
    lines = ["| mean over steps and seeds | FP32 head on | off | on / off | 95% interval | by seed |", "|---" * 6 + "|"]
    lines += [f"| {label} | {_ratio_cells(list(means[name].values()))} |" for name, label in MISMATCH.items()]
    seeds = sorted(means["k3_kl"])
    rows = [runs[seed] for runs in (on, off) for seed in seeds]
    steps = [str(len(_common_steps(on[seed], off[seed], "k3_kl"))) for seed in seeds]
    lines.append(
        f"\nRecipe `recipes/tiny-gpu`, bf16 in trainer and generator; the steps that both runs of a seed have, of 512 "
        f"responses each: {listed(steps)} of {seeds_text(seeds)}; *on / off*: geometric mean over seeds, with "
        f"Student's interval over the logarithms of their ratios; {machines_text(rows, ('verl', 'vllm', 'torch'))}; "
        f"{notes_text({'FP32 head on': _of(on, seeds), 'FP32 head off': _of(off, seeds)})}{commands_text(rows)}."
    )
    return "\n".join(lines)


def _of(runs: Mapping[int, Row], seeds: Sequence[int]) -> dict[int, Row]:
    return {seed: runs[seed] for seed in seeds}


def _common_steps(mine: Row, other: Row, name: str) -> list[tuple[float, float]]:
    """What two runs have at ``name``, of the steps at which both have it."""
    ours, theirs = (dict(zip(row["points"]["step"], row["points"][name], strict=True)) for row in (mine, other))
    pairs = [(value, theirs.get(step)) for step, value in ours.items()]
    return [(value, at_other) for value, at_other in pairs if value is not None and at_other is not None]


def _means_by_seed(on: Mapping[int, Row], off: Mapping[int, Row], name: str) -> dict[int, tuple[float, float]]:
    """Means over the common steps, with the head and without it, of the seeds that have some."""
    pairs = {seed: _common_steps(on[seed], off[seed], name) for seed in sorted(on.keys() & off.keys())}
    return {
        seed: (statistics.fmean(mine for mine, _ in found), statistics.fmean(other for _, other in found))
        for seed, found in pairs.items()
        if found
    }


def _ratio_cells(means: Sequence[tuple[float, float]]) -> str:
    """Means over seeds, the geometric mean of the seeds' ratios, its interval and their range; one seed has neither."""
    with_head, without = (statistics.fmean(column) for column in zip(*means, strict=True))
    ratios = [mine / other for mine, other in means]
    mean, spread = ratios[0], " | "
    if len(ratios) > 1:
        mean, low, high = geometric(ratios)
        spread = f"{low:.2f} to {high:.2f} | {min(ratios):.2f} to {max(ratios):.2f}"
    return f"{with_head:.2e} | {without:.2e} | {mean:.2f} | {spread}"


def machines_text(rows: Iterable[Row], names: Sequence[str]) -> str:
    """Hardware, versions and commits of rows, each once."""
    rows = list(rows)
    machines = dict.fromkeys(
        f"{row['hardware']}{', driver ' + row['driver'] if 'driver' in row else ''}; {versions_text(row, names)}"
        for row in rows
    )
    commits = commits_text(rows)
    return f"{' and '.join(machines)}; commit{'s' * (',' in commits)} {commits}"


def notes_text(runs: Mapping[str, Mapping[int, Row]]) -> str:
    """The distinct notes of labelled runs, each behind the labels and seeds that have it; ends in ``; `` if any."""
    holders: dict[str, dict[str, list[int]]] = {}
    for label, found in runs.items():
        for seed, row in sorted(found.items()):
            for note in filter(None, row.get("note", "").split("; ")):
                holders.setdefault(note, {}).setdefault(label, []).append(seed)
    by_holders: dict[str, list[str]] = {}
    for note, labels in holders.items():
        who = ", ".join(f"{label} ({seeds_text(seeds)})" for label, seeds in labels.items())
        by_holders.setdefault(who, []).append(note)
    return "".join(f"{who}: {', '.join(notes)}; " for who, notes in by_holders.items())


def commands_text(rows: Iterable[Row]) -> str:
    """Commands of rows, each once."""
    return listed(list(dict.fromkeys(f"`{row['command']}`" for row in rows)))


def seeds_text(seeds: Sequence[int]) -> str:
    """``seed 0``, ``seeds 0, 1 and 2``."""
    return f"seed{'s' * (len(seeds) > 1)} {listed([str(seed) for seed in seeds])}"


def listed(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


if __name__ == "__main__":
    print(mismatch_table())
