# SPDX-License-Identifier: Apache-2.0
"""Throughput of pipeline_rl (keep, recompute), verl's separate_async and verl's sync, and the simulator's view.

python benchmarks/bench_pipeline.py                       two CPU cores, a random tiny model
python benchmarks/bench_pipeline.py --gpus 2 --model PATH one trainer and one generator (more: --trainer-gpus)

All ways train the same model on the same data with the same batch, one after the other, in two regimes: long uneven
responses (generation-bound) and short ones (trainer-bound). The first steps of a run are left out. sync uses all
devices for generation and training in turns; on the CPU, where devices are logical, it uses the same two cores.

The simulator gets the rates that were measured in the keep and separate_async runs, and predicts each way at the
measured size and at 80 and 1,000 devices (64:16, as in the paper).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rows import REPO, append_rows, run_facts

sys.path.insert(0, str(REPO))

from scalerl_verl.pipeline.admission import AdmissionRule
from scalerl_verl.pipeline.simulator import Rates, Simulation
from tests.e2e.launching import CPU_ENVIRONMENT, GROUP_SIZE, NUM_PROMPTS, VerlRun, launch_verl, make_assets
from tests.gpu.test_gpu_runs import GPU

BENCH = "pipeline"
PREFIX = "scalerl/pipeline"
REGIMES = {"generation-bound": 160, "trainer-bound": 16}
"""Regime -> longest response in tokens; lengths are those of a random model, about geometric."""
WARM_UP_STEPS = 3
SLEEP_S = 1.0
"""What verl's client waits before it sends an aborted request again."""


def overrides(way: str, k: int, num_gpus: int, trainer_gpus: int) -> list[str]:
    """Command line of one way, without sizes."""
    disaggregated = [
        "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.rollout.nnodes=1",
        f"actor_rollout_ref.rollout.n_gpus_per_node={max(1, num_gpus - trainer_gpus)}",
        f"trainer.n_gpus_per_node={trainer_gpus}",
        f"actor_rollout_ref.rollout.checkpoint_engine.backend={'nccl' if num_gpus else 'gloo'}",
    ]
    if way == "sync":
        return ["trainer.v1.trainer_mode=sync", f"trainer.n_gpus_per_node={num_gpus or 1}"]
    if way == "separate_async":
        return [
            "trainer.v1.trainer_mode=separate_async",
            "trainer.v1.separate_async.parameter_sync_step=1",
            # as far ahead of the trainer as k lets pipeline_rl be
            f"trainer.v1.separate_async.num_warmup_batches={k}",
            f"trainer.v1.sampler.max_off_policy_threshold={k + 1}",
            "trainer.v1.sampler.max_off_policy_strategy=wait",
            *disaggregated,
        ]
    return [
        "trainer.v1.trainer_mode=pipeline_rl",
        f"+trainer.v1.pipeline_rl.max_staleness={k}",
        f"+trainer.v1.pipeline_rl.kv_on_update={way.removeprefix('pipeline_rl ')}",
        *disaggregated,
    ]


WAYS = ("pipeline_rl keep", "pipeline_rl recompute", "separate_async", "sync")


def run_way(way: str, regime: str, assets: Path, arguments: argparse.Namespace) -> VerlRun:
    """One run of main_ppo.

    Raises:
        RuntimeError: it failed; with the end of its log.
    """
    length = arguments.response_length or REGIMES[regime]
    sizes = [
        f"data.train_files={assets}/mixed.parquet",
        f"data.max_response_length={length}",
        f"actor_rollout_ref.rollout.max_model_len={length + 32}",
        f"trainer.total_training_steps={arguments.steps}",
        "+trainer.v1.sampler.sampler_kwargs.poll_interval_s=0.05",
    ]
    if arguments.model:
        sizes.append(f"actor_rollout_ref.model.path={arguments.model}")
    presets = ["+scalerl=recipe", *GPU] if arguments.gpus else ["+scalerl=[recipe,cpu]"]
    lines = [*presets, *sizes, *overrides(way, arguments.k, arguments.gpus, arguments.trainer_gpus), *arguments.more]
    folder = Path(tempfile.mkdtemp(prefix="bench_pipeline_"))
    run = launch_verl(folder, assets, lines, {} if arguments.gpus else CPU_ENVIRONMENT, arguments.timeout_s)
    if run.code != 0:
        raise RuntimeError(f"{way} in {regime} ended with {run.code}:\n{run.tail()}")
    return run


def measure(run: VerlRun) -> dict[str, Sequence[float]]:
    """Metric -> one value a step, the first steps left out."""
    steps = [metrics for step, metrics in sorted(run.metrics.items()) if step > WARM_UP_STEPS]

    def column(name: str) -> list[float]:
        return [metrics[name] for metrics in steps if name in metrics]

    tokens, seconds = column("scalerl/data/generated_tokens_sum"), column("timing_s/step")
    return {
        "trained_tokens_per_s": [sum(tokens) / sum(seconds)],
        "step_s": seconds,
        "update_s": column("timing_s/update_weights"),
        "pause_s": column(f"{PREFIX}/pause_s"),
        "swap_s": column(f"{PREFIX}/swap_s"),
        "transfer_s": column(f"{PREFIX}/transfer_s"),
        "recomputed_tokens": column(f"{PREFIX}/recomputed_tokens"),
        "tokens_lost": column(f"{PREFIX}/tokens_lost"),
        "generator_idle_fraction": column(f"{PREFIX}/generator_idle_fraction"),
        "trainer_idle_fraction": column(f"{PREFIX}/trainer_idle_fraction"),
        "staleness_mean": column(f"{PREFIX}/staleness_mean"),
        "train_s_per_token": [a / b for a, b in zip(column("timing_s/update_actor"), tokens, strict=False)],
        "mean_length": [count / (NUM_PROMPTS * GROUP_SIZE) for count in tokens],
    }


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def as_rows(way: str, case: dict[str, Any], measured: dict[str, Sequence[float]], facts: dict) -> list[dict]:
    """Benchmark rows of one run."""
    rows = []
    for metric, values in measured.items():
        if values:
            row = {"case": case, "impl": way, "metric": metric, "unit": metric.rsplit("_", 1)[-1], "peak_gib": None}
            row |= {f"p{q}": quantile(values, q / 100) for q in (20, 50, 80, 95)}
            rows.append({**row, **facts})
    return rows


def rates_from(measured: dict[str, dict[str, Sequence[float]]], slots: int) -> Rates:
    """Speeds of the machine from the keep and the separate_async run (medians).

    The decoding step comes from the throughput of busy generators with all their slots in use.
    """
    keep, rival = measured["pipeline_rl keep"], measured["separate_async"]
    busy = 1 - statistics.median(keep["generator_idle_fraction"])
    return Rates(
        num_replicas=1,
        slots=slots,
        step_s=slots * busy / keep["trained_tokens_per_s"][0],
        train_s_per_token=statistics.median(keep["train_s_per_token"]),
        update_s=statistics.median(keep["update_s"]),
        pause_s=statistics.median(keep["pause_s"]),
        resume_s=SLEEP_S + statistics.median(rival["update_s"]),
    )


def simulate(rates: Rates, k: int, mean_length: float, longest: int, batch_groups: int, steps: int) -> dict[str, float]:
    """Way -> trained tokens per second of simulated time."""
    speeds = {}
    for way, name in (("keep", WAYS[0]), ("recompute", WAYS[1]), ("abort", WAYS[2]), ("sync", WAYS[3])):
        bound = 0 if way == "sync" else k
        simulation = Simulation(
            AdmissionRule(batch_groups, bound), rates, way, GROUP_SIZE,
            lambda rng: min(longest, 1 + int(rng.expovariate(1 / mean_length))),
        )  # fmt: skip
        speeds[name] = simulation.run(steps).tokens_per_s
    return speeds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=0, help="0: the CPU")
    parser.add_argument("--trainer-gpus", type=int, default=1)
    parser.add_argument("--model", help="path of the model; default: a random tiny one")
    parser.add_argument("--response-length", type=int, help="longest response; default: by regime")
    parser.add_argument("--regimes", nargs="+", default=list(REGIMES), choices=list(REGIMES))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--timeout-s", type=float, default=900)
    parser.add_argument("more", nargs="*", help="further overrides, for all ways")
    arguments = parser.parse_args()
    facts = {**run_facts(uuid.uuid4().hex[:12]), "num_devices": arguments.gpus}
    assets = make_assets(Path(tempfile.mkdtemp(prefix="bench_assets_")))
    for regime in arguments.regimes:
        case = {"regime": regime, "k": arguments.k, "steps": arguments.steps, "model": arguments.model or "tiny"}
        measured = {}
        for way in arguments.ways:
            measured[way] = measure(run_way(way, regime, assets, arguments))
            append_rows(BENCH, as_rows(way, case, measured[way], facts))
            print(regime, way, f"{measured[way]['trained_tokens_per_s'][0]:.0f} trained tokens/s", flush=True)
        if {WAYS[0], WAYS[2]} <= set(measured):
            append_rows(BENCH, predicted_rows(case, measured, arguments, facts))
    return 0


def predicted_rows(case: dict, measured: dict, arguments: argparse.Namespace, facts: dict) -> list[dict]:
    """What the simulator says at the measured size and at the sizes that cannot be had here."""
    rates = rates_from(measured, slots=NUM_PROMPTS * GROUP_SIZE)
    mean_length = statistics.fmean(measured[WAYS[0]]["mean_length"])
    longest = arguments.response_length or REGIMES[case["regime"]]
    rows = []
    for devices, replicas, batch_groups in ((2, 1, NUM_PROMPTS), (80, 64, 64 * NUM_PROMPTS), (1000, 800, 800 * 8)):
        # More trainer devices train proportionally faster; a pause stays what it is.
        sized = replace(rates, num_replicas=replicas, train_s_per_token=rates.train_s_per_token / (devices - replicas))
        speeds = simulate(sized, arguments.k, mean_length, longest, batch_groups, steps=10)
        rows += [
            {
                "case": {**case, "simulated_devices": devices}, "impl": f"simulator: {way}", "unit": "tokens/s",
                "metric": "trained_tokens_per_s", "p20": speed, "p50": speed, "p80": speed, "peak_gib": None, **facts,
            }
            for way, speed in speeds.items()
        ]  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(main())
