# SPDX-License-Identifier: Apache-2.0
"""What a run of the pipeline benchmark measured, from the files it left, complete or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.launching import Step, read_steps, whole_lines
from benchmarks.pipeline.assets import Size
from benchmarks.pipeline.plugin.scalerl_bench.engine_log import BIN_S
from benchmarks.pipeline.runs import FULLY_ASYNC, Plan

PREFIX = "scalerl/pipeline"


def measured_steps(steps: Sequence[Step], plan: Plan, size: Size) -> tuple[list[Step], list[Step]]:
    """Steps of either regime in which only its own prompts were under way, and the run was warm.

    The prompts of ``lead`` batches are under way at once. The first steps get the shortest responses of the start; the
    steps around the change of regimes get some of each. fully_async_policy trains what is complete first, so that long
    responses of the first regime arrive much later: of its second regime the steps after the last of these are taken.
    """
    change, last = plan.steps[0], sum(plan.steps)
    warm = max(2, plan.lead)
    first = [s for s in steps if warm < s.number <= change - (plan.lead - 1)]
    # towards the end nothing new is started, and generators run dry
    second = [s for s in steps if change + max(2, plan.lead + 1) < s.number <= last - (plan.lead - 1)]
    if plan.mode == FULLY_ASYNC:
        tokens = size.regimes[1].prompt_tokens
        mixed = max((step.number for step in steps if step.metrics["prompt_length/mean"] != tokens), default=0)
        second = [step for step in second if step.number > mixed]
    return first, second


@dataclass(frozen=True)
class EngineTotals:
    """Of all engines over some time: share of it without a model step, tokens prefilled again."""

    idle_fraction: float
    prefilled_again: int
    prefilled: int


def read_engines(folder: Path, began: float, ended: float) -> EngineTotals:
    """Sum up the engines' logs between two moments.

    Raises:
        FileNotFoundError: no engine wrote one.
    """
    paths = sorted(folder.glob("engine-*.txt"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no engine-*.txt: the benchmark's plugin was not loaded by vLLM")
    low, high = int(began / BIN_S), int(ended / BIN_S)
    busy, again, prefilled = 0, 0, 0
    for path in paths:
        for line in whole_lines(path):
            number, _, _, tokens, of_these = map(int, line.split())
            if low <= number < high:
                busy, again, prefilled = busy + 1, again + of_these, prefilled + tokens
    return EngineTotals(1 - busy / max(1, (high - low) * len(paths)), again, prefilled)


def measure(folder: Path, steps: Sequence[Step], num_responses: int) -> dict[str, Sequence[float]]:
    """Metric -> values (one a step, or one for all of them), over steps that follow each other."""

    def column(name: str) -> list[float]:
        return [step.metrics[name] for step in steps if name in step.metrics]

    began, ended = steps[0].began, steps[-1].ended
    # verl's own trainers count no tokens sampled
    tokens = column("scalerl/data/generated_tokens_sum") or [
        mean * num_responses for mean in column("response_length/mean")
    ]
    try:
        engines = read_engines(folder, began, ended)
        of_engines = {
            "generator_idle_fraction": [engines.idle_fraction],
            "prefilled_again_tokens": [engines.prefilled_again / len(steps)],
            "prefilled_tokens": [engines.prefilled / len(steps)],
        }
    except FileNotFoundError as error:  # the rest was measured all the same
        print(f"without the engines' metrics: {error}", flush=True)
        of_engines = {}
    update_s = column("timing_s/update_weights") or column("timing_s/timing_s/param_sync")
    return {
        "trained_tokens_per_s": [sum(tokens) / (ended - began)],
        "step_s": [step.ended - step.began for step in steps],
        "update_s": update_s,
        # verl's way stops the generators for all of it: abort is its first act, resuming its last
        "pause_s": column(f"{PREFIX}/pause_s") or update_s,
        "swap_s": column(f"{PREFIX}/swap_s"),
        "transfer_s": column(f"{PREFIX}/transfer_s"),
        "sent_gib": column(f"{PREFIX}/sent_gib"),
        **of_engines,
        "recomputed_tokens": column(f"{PREFIX}/recomputed_tokens"),
        "tokens_lost": column(f"{PREFIX}/tokens_lost"),
        "trainer_idle_fraction": column(f"{PREFIX}/trainer_idle_fraction"),
        "staleness_mean_versions": column(f"{PREFIX}/staleness_mean"),
        "train_s": column("timing_s/update_actor"),
        # the trainer's own work: neither waiting for data nor handing over weights
        "work_s": [
            step.ended - step.began - step.metrics.get("timing_s/gen", 0.0) - update
            for step, update in zip(steps, update_s, strict=True)
        ],
        "wait_s": column("timing_s/gen"),
        "batch_tokens": tokens,
        "response_length_tokens": [count / num_responses for count in tokens],
    }


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def rows_of(folder: Path, plan: Plan, size: Size, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Benchmark rows of one run; a regime that was not reached has none."""
    rows = []
    for regime, steps in zip(size.regimes, measured_steps(read_steps(folder), plan, size), strict=True):
        if not steps:
            continue
        case = {
            "regime": regime.name, "k": plan.k, "steps": len(steps), "prompts": size.prompts, "group": size.group,
            "slots": size.slots, "mean_length": regime.mean, "longest": regime.longest, "vocab": size.vocab,
            "prompt_tokens": regime.prompt_tokens, "hidden": size.hidden, "layers": size.layers,
        }  # fmt: skip
        for metric, values in measure(folder, steps, size.prompts * size.group).items():
            if values:
                quantiles = {f"p{q}": quantile(values, q / 100) for q in (20, 50, 80, 95)}
                unit = metric.rsplit("_", 1)[-1] if not metric.endswith("per_s") else "tokens/s"
                row = {"case": case, "impl": plan.name, "metric": metric, "unit": unit, "peak_gib": None}
                rows.append({**row, **quantiles, **facts})
    return rows
