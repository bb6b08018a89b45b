# SPDX-License-Identifier: Apache-2.0
"""Seconds and memory of a training step on one device: the recipe, and verl's GRPO with and without its fused head.

python -m benchmarks.step.bench --way recipe                          2B random parameters, on the first CUDA device
python -m benchmarks.step.bench --way "verl grpo" --gpu 1
python -m benchmarks.step.bench --way recipe --size cpu               in small, without a GPU

One way an invocation; those with the same --run-id are compared. Trainer and generator take turns on the device. Every
response has the same length, since a random model ends none. The first step is left out: it warms up. `scalerl plan`
is asked about the same command line, and its numbers stand beside those of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import launching
from benchmarks.pipeline.measure import quantile
from benchmarks.rows import append_rows, describe_gpu, run_facts
from benchmarks.step.runs import LOADS, WAYS, Load, make_assets, overrides

BENCH = "step"
METRICS = {
    "gen_s": "timing_s/gen",
    "old_log_prob_s": "timing_s/old_log_prob",
    "update_actor_s": "timing_s/update_actor",
    "update_weights_s": "timing_s/update_weights",
    "trainer_allocated_gib": "actor/perf/max_memory_allocated_gb",
    "trainer_reserved_gib": "actor/perf/max_memory_reserved_gb",
    "host_gib": "actor/perf/cpu_memory_used_gb",
    "response_tokens": "response_length/mean",
}
"""Metric of a row -> verl's."""


def values_of(steps: Sequence[launching.Step]) -> dict[str, list[float]]:
    """Metric -> its values, one a step."""
    found = {
        name: [step.metrics[theirs] for step in steps if theirs in step.metrics] for name, theirs in METRICS.items()
    }
    return {"step_s": [step.ended - step.began for step in steps], **found}


def planned(lines: Sequence[str], gpu_gib: float, load: Load, env: dict[str, str]) -> dict[str, float]:
    """What `scalerl plan` says about the same run: GiB of the trainer at its peak; nothing where it says nothing."""
    command = [sys.executable, "-m", "scalerl_verl.cli", "plan", *lines, "--gpus", "1", "--device", "h200"]
    command += ["--gpu-memory-gib", f"{gpu_gib:.0f}", "--json"]
    command += ["--mean-prompt", str(load.prompt_tokens), "--mean-response", str(load.response_tokens)]
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8")
    if done.returncode not in (0, 3):
        print(f"scalerl plan ended with {done.returncode}: {done.stderr[-2000:]}", flush=True)
        return {}
    return {"planned_trainer_gib": json.loads(done.stdout)["trainer_gib"]["peak"]}


def rows_of(way: str, load: Load, steps: Sequence[launching.Step], plan: dict[str, float], facts: dict) -> list[dict]:
    """Benchmark rows of a run."""
    case: dict[str, Any] = {
        "size": load.model, "prompts": load.prompts, "group": load.group, "prompt_tokens": load.prompt_tokens,
        "response_tokens": load.response_tokens, "micro_tokens": load.micro_tokens, "steps": len(steps),
    }  # fmt: skip
    values = {**values_of(steps), **{name: [value] for name, value in plan.items()}}
    return [
        {"case": case, "impl": way, "metric": name, "unit": name.rsplit("_", 1)[-1], "peak_gib": None,
         **{f"p{q}": quantile(found, q / 100) for q in (20, 50, 80)}, **facts}
        for name, found in values.items() if found
    ]  # fmt: skip


def run(arguments: argparse.Namespace, folder: Path) -> int:
    load, on_gpu = LOADS[arguments.size], arguments.size != "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    assets = arguments.assets or folder / "assets"
    make_assets(assets, load)
    facts = {**run_facts(arguments.run_id), **(describe_gpu() if on_gpu else {})}
    env = launching.environment(folder, launching.new_run_id(), [arguments.gpu] if on_gpu else [])
    lines = [*overrides(arguments.way, load, assets, folder, arguments.steps, on_gpu=on_gpu), *arguments.more]
    gpu_gib = float(facts["hardware"].rsplit(", ", 1)[-1].split()[0]) if on_gpu else 80
    plan = planned(lines, gpu_gib, load, env)
    code = launching.run_verl(lines, env, folder, arguments.steps, arguments.seconds)
    steps = launching.read_steps(folder)
    print(f"{arguments.way}: ended with {code} after {len(steps)} of {arguments.steps} steps", flush=True)
    if code is not None and code != 0:
        print(launching.log_tail(folder), flush=True)
    if len(steps) < 2:
        return 1
    rows = rows_of(arguments.way, load, steps[1:], plan, facts)
    for row in rows:
        print(f"{row['impl']:24} {row['metric']:24} {row['p50']:.4g}", flush=True)
    append_rows(BENCH, rows, arguments.out)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--size", choices=LOADS, default="2B")
    parser.add_argument("--gpu", type=int, default=0, help="CUDA device")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3600, help="after which the run is ended and measured")
    parser.add_argument("--work", type=Path, help="folder of the run; default: a temporary one")
    parser.add_argument("--assets", type=Path, help="where model and data are made; default: in the run's folder")
    parser.add_argument("--run-id", default=uuid.uuid4().hex[:12])
    parser.add_argument("--out", type=Path, help="file for the rows; default: benchmarks/results")
    parser.add_argument("more", nargs="*", help="further overrides")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    return run(arguments, arguments.work or Path(tempfile.mkdtemp(prefix="bench_step_")))


if __name__ == "__main__":
    sys.exit(main())
