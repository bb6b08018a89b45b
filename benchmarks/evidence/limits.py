# SPDX-License-Identifier: Apache-2.0
"""What the miniature's comparisons hang on: the axis, the window of a fit, the seeds, one contrast instead of three."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from benchmarks.evidence.fits import LARGER, LATE, average, fit_mean, resampled_ceilings, stack
from benchmarks.evidence.groups import named
from benchmarks.evidence.notes import NOT_YET
from benchmarks.evidence.recipes import EARLY, LEVEL, MAIN, POWER, difference_text
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
from scalerl_verl.scaling import FitRefused, fit_curve
from scalerl_verl.scaling.backtest import Forecast, backtest

PROMPTS = 256
"""Of a generated batch, which eight optimizer steps train on."""
SAMPLED, TRAINED = 2.0, 6.0
"""FLOPs a parameter and token, to sample it and to train on it."""
SMALL = Group(problems=MANY)
Axis = Callable[[str, Points], list[float]]
"""(recipe, its run) -> cumulative cost at each validation, in sampled tokens of a run that trains on all it samples."""


def flops(name: str, points: Points) -> list[float]:
    """FLOPs: DAPO samples more prompts than it trains on. Between validations the batch before the later one counts."""
    return _cost(points, lambda i: PROMPTS / points["prompts"][i])


def flops_without_equal(name: str, points: Points) -> list[float]:
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
    heads = [LABELS[name] for name in MAIN[1:]]
    lines = [f"| parameters | equal | at | {' | '.join(heads)} |", "|---" * (3 + len(heads)) + "|"]
    for line in LINES:
        runs = points_of(named(line.group, MAIN))
        at, differences = _at_steps(runs, line.is_end) if line.axis is None else _at_cost(runs, line.axis, line.is_end)
        cells = [difference_text(differences[name]) for name in MAIN[1:]]
        lines.append(f"| {line.group.size} | {line.told} | {at} | {' | '.join(cells)} |")
    lines.append(
        f"\nThe same differences on {MANY:,} problems, where something else than sampled tokens is equal. FLOPs: "
        f"{SAMPLED:g} a parameter and sampled token, {TRAINED:g} a trained one, told in millions of tokens that are "
        "both; how many are trained on is known of the batch before each validation."
    )
    return "\n".join(lines)


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
        name: {seed: {**points, "tokens": axis(name, points)} for seed, points in found.items()}
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


def late_text() -> str:
    """The late deficit on few problems as one comparison instead of three."""
    runs = points_of(read_group(Group()))
    told = []
    for reference in (REFERENCE, KEPT):
        differences = contrast(runs, reference, LATE)
        p = float(stats.ttest_1samp(differences, 0).pvalue)
        told.append(f"{difference_text(differences)} (p = {p:.3f}) above *{LABELS[reference]}*")
    return (
        f"In one contrast at {LATE / 1e6:g}M tokens, on 2,048 problems, the mean of GRPO, DAPO and GSPO is "
        f"{' and '.join(told)}."
    )


def ceilings_text() -> str:
    """Ceilings of the larger model on windows of one length, and against ScaleRL's with the same seeds drawn."""
    runs = points_of(named(LARGER, MAIN))
    end = average(stack(runs["grpo"]))[0][-1]
    tokens, scores, errors = average(stack(runs["dapo"]))
    used = (tokens > 0) & (tokens <= end)
    cut = fit_curve(tokens[used], scores[used], errors[used], R0=float(scores[0]))
    apart = resampled_ceilings(runs["grpo"]) - resampled_ceilings(runs[REFERENCE])
    low, high = np.percentile(apart, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return (
        f"DAPO's window is {tokens[-1] / 1e6:.1f}M tokens, that of the others {end / 1e6:.1f}M: cut there its A is "
        f"{cut.A:.3f} ({cut.verdict}). With the same seeds drawn for both, GRPO's A is "
        f"{fit_mean(runs['grpo']).A - fit_mean(runs[REFERENCE]).A:.3f} above ScaleRL's ({low:.3f} to {high:.3f})."
    )


def forecast_text() -> str:
    """How far early fits that the tool calls identified are off: of means over seeds, and of single seeds."""
    means, singles = [], []
    for group in (Group(), SMALL, LARGER, Group(k=1)):
        for name, found in points_of(read_group(group)).items():
            tokens, scores, errors = average(stack(found))
            if tokens[-1] >= LATE and group == Group():
                means += _identified(tokens, scores, errors, (0.5,), LABELS[name])
            for points in found.values():
                if points["tokens"][-1] >= LATE:
                    columns = (np.array(points[key], dtype=float) for key in ("tokens", "pass_rate", "stderr"))
                    singles += _identified(*columns, (0.5, 0.75), LABELS[name])
    told = ", ".join(f"{label} {forecast.last_error:+.3f}" for label, forecast in means)
    rms = math.sqrt(statistics.fmean(forecast.last_error**2 for _, forecast in singles))
    cover = statistics.fmean(forecast.coverage for _, forecast in singles)
    return (
        "*Identified* is no promise. Of the first table's means over seeds, the halves that the tool calls so miss the "
        f"end by {told}. Of single seeds, also of 3M, it calls {len(singles)} halves and three quarters so: they miss "
        f"the end by {rms:.3f} (root mean square), and their 95% intervals hold {cover:.0%} of the later points."
    )


def _identified(tokens, scores, errors, shares: Sequence[float], label: str) -> Iterator[tuple[str, Forecast]]:
    used = tokens > 0
    try:
        fit = fit_curve(tokens[used], scores[used], errors[used], R0=float(scores[0]))
    except FitRefused:
        return
    for forecast in backtest(fit.points, R0=float(scores[0]), shares=shares):
        if forecast.fit is not None and forecast.fit.verdict == "identified":
            yield label, forecast


def roughness(runs: Mapping[int, Points]) -> float:
    """Root mean square of second differences of pass rates after the third validation, as noise of one validation."""
    squares = [d * d / 6 for points in runs.values() for d in np.diff(points["pass_rate"][3:], 2)]
    return math.sqrt(statistics.fmean(squares))


def roughness_text() -> str:
    """How rough ScaleRL's curves are beside GRPO's where nothing is dropped from the data."""
    told = []
    for group, name in ((Group(), KEPT), (SMALL, REFERENCE), (LARGER, REFERENCE)):
        runs = points_of(read_group(group))
        ratio = roughness(runs[name]) / roughness(runs["grpo"])
        told.append(f"{ratio:.1f} times ({group.size} on {group.problems:,})")
    return (
        f"- *Stability* is not in the tables. Where nothing is left out, ScaleRL's curves are {', '.join(told)} as "
        "rough as GRPO's (second differences of pass rates). Gradient norms and the largest ratios were not recorded."
    )


def two_seeds_text() -> str:
    """What two seeds could show at the spread that eight have."""
    runs = points_of(read_group(Group()))
    others = [found for name, found in runs.items() if name != REFERENCE]
    spreads = [statistics.stdev(paired(found, runs[REFERENCE], LATE)) for found in others]
    factor = float(stats.t.ppf((1 + LEVEL) / 2, 1) + stats.t.ppf(POWER, 1)) / math.sqrt(2)
    return (
        "- *Two seeds*, as `recipes/ablation/sweep.yaml` has them, settle nothing: at the spreads of the first table "
        f"they show {factor * min(spreads):.2f} to {factor * max(spreads):.2f} in 80% of tries."
    )


def of_recorded(part: Callable[[], str]) -> Callable[[], str]:
    """A part of the page, once every run that it compares is recorded."""

    def make() -> str:
        recorded = [set(read_group(group)) for group in (Group(), SMALL, LARGER)]
        return part() if {*MAIN, KEPT} <= recorded[0] and all(set(MAIN) <= found for found in recorded) else NOT_YET

    return make


PARTS: dict[str, Callable[[], str]] = {
    "axes": of_recorded(axes_table),
    "late": of_recorded(late_text),
    "ceilings": of_recorded(ceilings_text),
    "forecasts": of_recorded(forecast_text),
    "roughness": of_recorded(roughness_text),
    "two-seeds": of_recorded(two_seeds_text),
}
