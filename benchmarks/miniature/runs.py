# SPDX-License-Identifier: Apache-2.0
"""The miniature's recorded runs: which of them belong together, what they are called, where they were made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.rows import read_rows

BENCH = "miniature"
FEW = 2048
"""Training problems of a run that says nothing else."""
MANY = 16384
REFERENCE = "scalerl"
KEPT = "no_positive_resampling_off"
LABELS = {
    "scalerl": "ScaleRL",
    "grpo": "GRPO",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "no_loss": "GRPO's clip for CISPO",
    "no_prompt_average": "token average",
    "no_batch_normalisation": "prompt normalisation",
    "no_zero_variance_filtering": "zero-variance prompts kept",
    "no_positive_resampling_off": "mastered problems drawn again",
    "no_forced_interruption": "forced interruption left out",
    "eps_max_1": "CISPO's cap at 1",
    "eps_max_none": "CISPO without a cap",
}

Row = dict[str, Any]
Points = dict[str, Any]
Rows = dict[str, dict[int, Row]]
"""recipe -> seed -> row."""
Runs = dict[str, dict[int, Points]]
"""recipe -> seed -> points."""


@dataclass(frozen=True)
class Group:
    """What runs must share to be compared: model, optimizer steps a batch, number of training problems."""

    size: str = "0.3M"
    k: int = 8
    problems: int = FEW

    @classmethod
    def of(cls, case: Mapping[str, Any]) -> Group:
        return cls(case["size"], case["k"], case["train_problems"])

    @property
    def folder(self) -> str:
        """``0.3M.k8``, and with another number of problems ``0.3M.k8.16384``."""
        return f"{self.size}.k{self.k}" + ("" if self.problems == FEW else f".{self.problems}")


def select_rows(rows: Iterable[Row], group: Group) -> Rows:
    """The newest row of each run of a group, recipes in the order of ``LABELS``.

    A recipe's rows are all from one kind of machine and of as many held-out problems: half a recording on another one
    would mix two software stacks, and perhaps two lengths, in one mean. Of several such sets it is the one with the
    most sampled tokens, and of equals the newest: a short try on a laptop replaces nothing.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        if Group.of(row["case"]) == group and not (row["case"].get("both_ways") or row["case"].get("study")):
            found.setdefault(row["impl"], []).append(row)
    return {name: _longest_set(found[name]) for name in LABELS if name in found}


def _longest_set(rows: Iterable[Row]) -> dict[int, Row]:
    """seed -> row of the set of comparable rows with the most sampled tokens, the later of equals."""
    sets: dict[tuple[str, int], dict[int, Row]] = {}
    for row in rows:
        key = (row["hardware"], row["case"]["test_problems"])
        # the newest set stands last
        sets[key] = sets.pop(key, {}) | {row["case"]["seed"]: row}
    tokens = {key: sum(row["points"]["tokens"][-1] for row in found.values()) for key, found in sets.items()}
    return sets[max(reversed(sets), key=tokens.__getitem__)]


def read_group(group: Group) -> Rows:
    """`select_rows` of what is recorded."""
    return select_rows(read_rows(BENCH), group)


def points_of(rows: Rows) -> Runs:
    """The curves of rows."""
    return {name: {seed: row["points"] for seed, row in found.items()} for name, found in rows.items()}


def interval(points: Points) -> int:
    """Optimizer steps between validations; 1, which every number of steps is a multiple of, if there was only one."""
    updates = points["updates"]
    return int(updates[1] - updates[0]) if len(updates) > 1 else 1


def score_at(points: Points, tokens: float, every: int = 1) -> float | None:
    """Pass rate at a budget, between validations on a line over the logarithm of tokens.

    Args:
        points: of one run; its first point cost nothing and has no logarithm.
        tokens: sampled ones.
        every: use validations after a multiple of so many optimizer steps only. The line lies below a curve that bends,
            by .003 where the points are twice as far apart, so that two runs are compared on points equally far apart.

    Returns:
        None before the first of these validations and beyond the last.
    """
    used = [i for i, step in enumerate(points["updates"]) if step > 0 and step % every == 0]
    if not used or not points["tokens"][used[0]] <= tokens <= points["tokens"][used[-1]]:
        return None
    compute = np.log([points["tokens"][i] for i in used])
    return float(np.interp(math.log(tokens), compute, [points["pass_rate"][i] for i in used]))


def pair_at(mine: Points, theirs: Points, tokens: float) -> tuple[float, float] | None:
    """Pass rates of two runs at a budget, on the validations that both intervals have; None where one has none."""
    every = math.lcm(interval(mine), interval(theirs))
    pair = (score_at(mine, tokens, every), score_at(theirs, tokens, every))
    return None if pair[0] is None or pair[1] is None else (pair[0], pair[1])


def paired(mine: Mapping[int, Points], theirs: Mapping[int, Points], tokens: float) -> list[float]:
    """Differences within seeds at a budget, of the seeds that have it."""
    pairs = [pair_at(mine[seed], theirs[seed], tokens) for seed in sorted(set(mine) & set(theirs))]
    return [pair[0] - pair[1] for pair in pairs if pair is not None]


def shared(rows: Iterable[Row], key: str) -> Any:
    """What all rows have at ``key`` of their case.

    Raises:
        ValueError: they differ; a table of them would compare that instead of recipes.
    """
    values = {row["case"][key]: row["run_id"] for row in rows}
    if len(values) != 1:
        told = ", ".join(f"{value} ({run})" for value, run in values.items())
        raise ValueError(f"recorded runs to compare differ in {key}: {told}; record them under another --warm name")
    return next(iter(values))
