# SPDX-License-Identifier: Apache-2.0
"""What the miniature's comparisons hang on: what is held equal, and one contrast instead of three."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.evidence.compare import EARLY, LATE, MAIN, difference_text, named, p_value
from benchmarks.evidence.fits import LARGER
from benchmarks.markdown import table
from benchmarks.miniature.runs import (
    KEPT,
    LABELS,
    MANY,
    REFERENCE,
    Group,
    Points,
    Runs,
    pair_at,
    paired,
    points_of,
    read_group,
)

PROMPTS = 256
"""Of a generated batch, which eight optimizer steps train on."""
SAMPLED, TRAINED = 2.0, 6.0
"""FLOPs a parameter and token, to sample it and to train on it."""
SMALL = Group(problems=MANY)
Axis = Callable[[Points], list[float]]
"""A run -> cumulative cost at each validation, in sampled tokens of a run that trains on all it samples."""


def flops(points: Points) -> list[float]:
    """FLOPs: DAPO samples more prompts than it trains on. Between validations the batch before the later one counts."""
    return _cost(points, lambda i: PROMPTS / points["prompts"][i])


def flops_without_equal(points: Points) -> list[float]:
    """FLOPs if nobody trained on rows of prompts without a signal, of which only ScaleRL has recorded the number."""
    return _cost(points, lambda i: PROMPTS / points["prompts"][i] * points["kept_fraction"][i])


def _cost(points: Points, trained_share: Callable[[int], float]) -> list[float]:
    tokens, cost = points["tokens"], [0.0]
    for i in range(1, len(tokens)):
        per_token = (SAMPLED + TRAINED * trained_share(i)) / (SAMPLED + TRAINED)
        cost.append(cost[-1] + (tokens[i] - tokens[i - 1]) * per_token)
    return cost


@dataclass(frozen=True)
class Line:
    """A line of the table of axes: runs, what they are compared at, and whether early or at the end."""

    group: Group
    told: str
    axis: Axis | None
    is_end: bool


LINES = (
    Line(SMALL, "optimizer steps", None, False),
    Line(LARGER, "optimizer steps", None, False),
    Line(LARGER, "optimizer steps", None, True),
    Line(LARGER, "FLOPs", flops, True),
    Line(LARGER, "FLOPs, if ScaleRL did not train on prompts without a signal", flops_without_equal, True),
)


def axes_table() -> str:
    """Baselines beside ScaleRL early and at the end, by what is held equal."""
    lines = []
    for line in LINES:
        runs = points_of(named(line.group))
        at, differences = _at_steps(runs, line.is_end) if line.axis is None else _at_cost(runs, line.axis, line.is_end)
        lines.append((line.group.size, line.told, at, *(difference_text(differences[name]) for name in MAIN[1:])))
    return table(("parameters", "equal", "at", *(LABELS[name] for name in MAIN[1:])), lines)


def _at_steps(runs: Runs, is_end: bool) -> tuple[str, dict[str, list[float]]]:
    steps = set.intersection(*(set(points["updates"]) for found in runs.values() for points in found.values()))
    step = max(steps) if is_end else 32
    rates = {
        name: {seed: points["pass_rate"][points["updates"].index(step)] for seed, points in found.items()}
        for name, found in runs.items()
    }
    seeds = sorted(set.intersection(*(set(found) for found in rates.values())))
    return f"{step}", {name: [rates[name][s] - rates[REFERENCE][s] for s in seeds] for name in MAIN[1:]}


def _at_cost(runs: Runs, axis: Axis, is_end: bool) -> tuple[str, dict[str, list[float]]]:
    costed: Runs = {
        name: {seed: {**points, "tokens": axis(points)} for seed, points in found.items()}
        for name, found in runs.items()
    }
    last = min(points["tokens"][-1] for found in costed.values() for points in found.values())
    budget = math.floor(last / 1e5) * 1e5 if is_end else EARLY
    return f"{budget / 1e6:g}M", {name: paired(costed[name], costed[REFERENCE], budget) for name in MAIN[1:]}


def contrast(runs: Runs, reference: str, budget: float) -> list[float]:
    """Mean of the three baselines less a reference, within seeds."""
    found = []
    for seed, theirs in sorted(runs[reference].items()):
        pairs = [pair_at(runs[name][seed], theirs, budget) for name in MAIN[1:]]
        found.append(statistics.fmean(pair[0] - pair[1] for pair in pairs if pair is not None))
    return found


def late_table() -> str:
    """The late deficit on few problems as one comparison instead of three."""
    runs = points_of(read_group(Group()))
    lines = []
    for reference in (REFERENCE, KEPT):
        differences = contrast(runs, reference, LATE)
        lines.append((LABELS[reference], difference_text(differences), f"{p_value(differences):.3f}"))
    return table((f"at {LATE / 1e6:g}M tokens, beside", "mean of GRPO, DAPO and GSPO", "p"), lines)
