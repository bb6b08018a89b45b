# SPDX-License-Identifier: Apache-2.0
"""What docs/evidence.md tells of the miniature beside its tables, computed from the recorded runs and the task."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.evidence.groups import SIZES, named
from benchmarks.evidence.mismatch import runs_named
from benchmarks.evidence.recipes import EARLY, difference_text
from benchmarks.miniature.runs import (
    BENCH,
    FEW,
    KEPT,
    LABELS,
    MANY,
    REFERENCE,
    Group,
    Points,
    Runs,
    paired,
    points_of,
    read_group,
)
from benchmarks.rows import REPO, read_rows

Terms = tuple[int, ...]
Part = Callable[[Runs], str]
NOT_YET = "Not recorded yet: `python -m benchmarks.miniature.bench`."


def permuted_share(held_out: Sequence[Terms], training: Iterable[Terms]) -> float:
    """Share of held-out sums whose signed terms are those of a training sum in another order."""
    known = {tuple(sorted(terms)) for terms in training}
    return sum(tuple(sorted(terms)) in known for terms in held_out) / len(held_out)


def overlap_text() -> str:
    """How much of the held-out problems is a permutation of a training problem, of seed 0."""
    sys.path.insert(0, str(REPO / "recipes" / "quickstart"))
    from task import sample_problems

    sums = [problem.terms for problem in sample_problems(0, 1000, True, True)]
    shares = []
    for num in (FEW, MANY):
        training = [problem.terms for problem in sample_problems(0, num, False, True)]
        shares.append(f"{permuted_share(sums, training):.0%} among {num:,}")
    return (
        f"No held-out sum is a training sum. But of the {len(sums):,} many are one with its terms in another order: "
        f"with seed 0's training problems {' and '.join(shares)}."
    )


def spread_text(runs: Runs) -> str:
    """Standard deviations over seeds of pass rates, and of differences within seeds."""
    scores = [points["pass_rate"] for points in runs[REFERENCE].values()]
    if len(scores) < 3:
        return "Fewer than three seeds of ScaleRL are recorded, too few to tell how far seeds lie apart."
    rates = statistics.stdev(rates[0] for rates in scores), statistics.stdev(rates[-1] for rates in scores)
    spreads = []
    for found in runs.values():
        differences = paired(found, runs[REFERENCE], EARLY)
        if len(differences) > 2 and any(differences):
            spreads.append(statistics.stdev(differences))
    text = (
        f"The standard deviation over seeds is {rates[0]:.3f} for ScaleRL's pass rate before training and "
        f"{rates[1]:.3f} at its end"
    )
    if not spreads:
        return f"{text}; no recipe differs from it on three seeds at {EARLY / 1e6:g}M tokens yet."
    lowest, highest = (f"{value:.3f}" for value in (min(spreads), max(spreads)))
    return (
        f"{text}; for differences within seeds at {EARLY / 1e6:g}M tokens it is {lowest}"
        f"{'' if lowest == highest else f' to {highest}'}."
    )


def start_text(runs: Runs) -> str:
    """What interrupting instead of cutting is worth: before training by size, and later."""
    told = [f"{_start_difference(runs)} at {Group().size}"]
    for size in SIZES[1:]:
        larger = points_of(named(Group(size, problems=MANY), (REFERENCE, "grpo")))
        if len(larger) == 2:
            told.append(f"{_start_difference(larger)} at {size}")
    text = f"Before any training, ScaleRL's way of validation beside GRPO's is worth {', '.join(told)}."
    return " ".join(filter(None, (text, interrupted_text(), both_ways_text())))


def _start_difference(runs: Runs) -> str:
    """ScaleRL's pass rates less GRPO's before training, of the same models."""
    ours, theirs = runs[REFERENCE], runs["grpo"]
    seeds = sorted(ours.keys() & theirs.keys())
    return difference_text([ours[seed]["pass_rate"][0] - theirs[seed]["pass_rate"][0] for seed in seeds])


def interrupted_text() -> str:
    """Share of held-out responses interrupted before training and later, in the runs through verl on GPUs."""
    before, later = [], []
    for name in ("pipeline_rl", "ppo_off_policy"):
        for row in runs_named(name, is_gpu=True).values():
            shares = zip(row["points"]["step"], row["points"].get("val_interrupted", []), strict=False)
            for step, share in shares:
                if share is not None:
                    (later if step else before).append(share)
    if not (before and later):
        return ""
    return (
        f"It goes away as responses get shorter: in ScaleRL's runs through verl on GPUs below, {min(before):.0%} to "
        f"{max(before):.0%} of held-out responses are interrupted before training, and at most {max(later):.2%} at any "
        "later validation."
    )


def both_ways_text() -> str:
    """What interrupting is worth for models under training, of runs validated both ways."""
    told = []
    for row in read_rows(BENCH):
        if row["case"].get("both_ways"):
            points, case = row["points"], row["case"]
            sign = 1 if row["impl"] == REFERENCE else -1
            pairs = zip(points["pass_rate"], points["pass_rate_other_limits"], strict=True)
            worth = ", ".join(f"{sign * (own - other):+.3f}" for own, other in pairs)
            steps = ", ".join(str(step) for step in points["updates"])
            told.append(f"{worth} after {steps} steps of {LABELS[row['impl']]} ({case['size']}, seed {case['seed']})")
    if not told:
        return ""
    worth = "; ".join(told)
    return (
        f"In runs validated both ways, interrupting is worth {worth}, each with a standard error of about .01 "
        "(`--both-ways`, on a processor)."
    )


def passes_text(runs: Runs) -> str:
    """How many problems DAPO's batches go through."""
    found = runs["dapo"].values()
    steps = _shared_steps(runs["dapo"])
    (first, _), (last, most) = (_mean_and_most([_at(p, "prompts", s) for p in found]) for s in (steps[0], steps[-1]))
    size = statistics.fmean(_at(points, "prompts", steps[0]) for points in runs["grpo"].values())
    return (
        f"Prompts that DAPO replaces are drawn from the same pass over the problems, as verl does it: to fill a batch "
        f"of {size:.0f} it goes through {first:,.0f} before the validation at step {steps[0]} and through {last:,.0f} "
        f"of {FEW:,} before that at step {steps[-1]}, in the mean of the seeds. So its passes take fewer optimizer "
        f"steps than those of the others. Here they are shorter still: seeds draw together until the last one's batch "
        f"is full (the most: {most:,.0f} before step {steps[-1]}), and what the others drew beyond theirs is gone from "
        "their pass, not trained on and not paid for."
    )


def _mean_and_most(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), max(values)


def dropped_table(runs: Runs) -> str:
    """Problems left out, prompts with a signal and pass rate of ScaleRL, every second validation."""
    found = list(runs[REFERENCE].values())
    lines = ["| optimizer steps | tokens | mastered problems left out | prompts with a signal | pass rate |"]
    lines.append("|---" * 5 + "|")
    for step in _shared_steps(runs[REFERENCE])[1::2]:
        tokens, dropped, kept, rate = (
            statistics.fmean(_at(points, name, step) for points in found)
            for name in ("tokens", "dropped", "kept_fraction", "pass_rate")
        )
        lines.append(f"| {step} | {tokens / 1e6:.2f}M | {dropped:,.0f} | {kept:.0%} | {rate:.3f} |")
    return "\n".join(lines)


def decline_text(runs: Runs) -> str:
    """From the highest mean pass rate to the last, within seeds; and the difference to problems drawn again."""
    found = list(runs[REFERENCE].values())
    steps = _shared_steps(runs[REFERENCE])
    means = {step: statistics.fmean(_at(points, "pass_rate", step) for points in found) for step in steps}
    best, last = max(means, key=means.__getitem__), steps[-1]
    falls = [_at(points, "pass_rate", last) - _at(points, "pass_rate", best) for points in found]
    budget = min(points["tokens"][-1] for name in (REFERENCE, KEPT) for points in runs[name].values())
    gains = paired(runs[REFERENCE], runs[KEPT], budget)
    return (
        f"ScaleRL is highest after {best} steps, at {means[best]:.3f}, and after {last} at {means[last]:.3f}: within "
        f"seeds a change of {difference_text(falls)} (which of {len(steps)} validations is highest is partly luck). "
        f"At {budget / 1e6:.2f}M tokens, the last that all runs of both have, its difference to *{LABELS[KEPT]}* is "
        f"{difference_text(gains)}."
    )


def check_text(runs: Runs) -> str:
    """Runs through verl beside the miniature's of the same seed, recipe and number of steps."""
    verl = runs_named("ppo_off_policy", is_gpu=False)
    shown, steps = [], set()
    for seed in sorted(verl.keys() & runs[REFERENCE].keys()):
        theirs, mine = verl[seed]["points"], runs[REFERENCE][seed]
        batches = next(i for i in theirs["step"] if i * Group().k in mine["updates"][1:])
        places = theirs["step"].index(batches), mine["updates"].index(batches * Group().k)
        rates = [
            f"{points['pass_rate'][i]:.3f} ± {points['stderr'][i]:.3f}"
            for points, i in zip((theirs, mine), places, strict=True)
        ]
        shown.append(f"{rates[0]} and {rates[1]} on the warm start of seed {seed}")
        steps.add(batches * Group().k)
    if not shown:
        return "Not recorded yet: `python -m benchmarks.evidence.record`."
    return (
        f"PPO-off-policy-8's runs check the miniature: after {' or '.join(map(str, sorted(steps)))} optimizer steps "
        f"verl and the miniature are at {', '.join(shown)}."
    )


def _shared_steps(runs: Mapping[int, Points]) -> list[int]:
    """Of validations of all seeds, without that before training."""
    return sorted(set.intersection(*(set(points["updates"]) for points in runs.values())) - {0})


def _at(points: Points, name: str, step: int) -> float:
    return float(points[name][points["updates"].index(step)])


def of_recorded(part: Part) -> Callable[[], str]:
    """A part of the page on the recorded runs of the small model."""

    def make() -> str:
        runs = points_of(read_group(Group()))
        needed: set[Any] = {REFERENCE, KEPT, "grpo", "dapo"}
        return part(runs) if needed <= set(runs) else NOT_YET

    return make


PARTS: dict[str, Callable[[], str]] = {
    "overlap": overlap_text,
    "spread": of_recorded(spread_text),
    "start": of_recorded(start_text),
    "passes": of_recorded(passes_text),
    "dropped": of_recorded(dropped_table),
    "decline": of_recorded(decline_text),
    "check": of_recorded(check_text),
}
