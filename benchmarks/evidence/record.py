# SPDX-License-Identifier: Apache-2.0
"""Keep of a run through verl what docs/evidence-methods.md tells of it.

python recipes/ablation/sweep.py --sweep recipes/ablation/cpu.yaml              # make the runs
python -m benchmarks.evidence.record NAME outputs/.../run/metrics.jsonl --steps 24 --command "..."   # a row a run

The row holds, by step, the held-out pass rate, the mismatch between trainer and generator, the compute, and times. A
run that did not reach its last step says so.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.evidence.cpu_seconds import cpu_by_step
from benchmarks.rows import append_rows, describe_gpu, run_facts
from scalerl_verl.json_lines import read_records

BENCH = "evidence"
METRICS = {
    "pass_rate": "scalerl/validation/pass_rate",
    "stderr": "scalerl/validation/stderr",
    "val_interrupted": "scalerl/length/val/interrupted_fraction",
    "log_ratio_abs_mean": "scalerl/mismatch/log_ratio_abs_mean",
    "k3_kl": "scalerl/mismatch/k3_kl",
    "generated_tokens": "scalerl/compute/generated_tokens",
    "gpu_hours": "scalerl/compute/gpu_hours",
    "step_s": "timing_s/step",
    "validation_s": "timing_s/testing",
    "idle_fraction": "scalerl/pipeline/trainer_idle_fraction",
    "staleness_mean": "scalerl/pipeline/staleness_mean",
    "peak_gib": "actor/perf/max_memory_allocated_gb",
}


def curve_of(path: Path) -> dict[str, list[float | None]]:
    """Steps, and what `METRICS` names at each of them; None where a step has none."""
    lines = read_records(path)
    points: dict[str, list[float | None]] = {"step": [line["step"] for line in lines]}
    for name, key in METRICS.items():
        values = [line["data"].get(key) for line in lines]
        if any(value is not None for value in values):
            points[name] = [None if value is None else float(f"{value:.5g}") for value in values]
    return points


def row_of(name: str, path: Path, facts: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """The row of one run; the note of one that was cut off says so."""
    row = {**facts, "impl": name, "metric": "run", "unit": "", "case": case, "points": curve_of(path)}
    last = row["points"]["step"][-1]
    if last < case["steps"]:
        row["note"] = "; ".join(filter(None, [facts.get("note"), f"ended at step {last} of {case['steps']}"]))
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="what was run")
    parser.add_argument("metrics", type=Path, nargs="+", help="metrics.jsonl, a seed each, from --seed on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", required=True, help="that made them")
    parser.add_argument("--steps", type=int, required=True, help="that the run was to have")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--gpu", action="store_true", help="note this host's GPU instead of its processor")
    parser.add_argument("--cpu-samples", type=Path, help="of benchmarks/evidence/cpu_seconds.py while they ran")
    parser.add_argument("--note", default="", help="what else a reader must know")
    arguments = parser.parse_args()
    facts = run_facts(arguments.name) | (describe_gpu() if arguments.gpu else {})
    facts |= {"command": arguments.command, "num_devices": arguments.devices}
    if arguments.note:
        facts["note"] = arguments.note
    rows = [
        row_of(arguments.name, path, facts, {"seed": seed, "steps": arguments.steps})
        for seed, path in enumerate(arguments.metrics, arguments.seed)
    ]
    if arguments.cpu_samples:
        for row, path in zip(rows, arguments.metrics, strict=True):
            seconds = cpu_by_step(arguments.cpu_samples, str(path.resolve()))
            row["points"]["cpu_s"] = [seconds.get(step) for step in row["points"]["step"]]
    append_rows(BENCH, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
