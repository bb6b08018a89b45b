# SPDX-License-Identifier: Apache-2.0
"""Keep of runs of recipes/smollm2-reasoning what its tables and its picture tell: one row a validation.

    python -m benchmarks.reasoning.record outputs/smollm2-reasoning/run --steps 100 --gpu

A run that was made on another machine says where: --hardware, --versions, --commit in place of this machine's.
Pass rates and standard errors over problems are those that the run logged, of all problems and of each family.
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import Row
from benchmarks.rows import append_rows, describe_gpu, run_facts
from recipes.reasoning.reward import SOURCE_PREFIX as FAMILY
from scalerl_verl.json_lines import read_records

BENCH = "reasoning"
VALIDATION = "scalerl/validation/"
METRICS = {
    "generated_tokens": "scalerl/compute/generated_tokens",
    "gpu_hours": "scalerl/compute/gpu_hours",
    "interrupted": "scalerl/length/val/interrupted_fraction",
    "num_problems": f"{VALIDATION}num_prompts",
    "num_responses": f"{VALIDATION}num_generations",
    "num_failed": f"{VALIDATION}num_failed",
    "log_ratio_abs_mean": "scalerl/mismatch/log_ratio_abs_mean",
    "step_s": "timing_s/step",
    "peak_gib": "actor/perf/max_memory_allocated_gb",
}
"""What a row has beside its pass rates; None where a validation has none, such as a step's seconds at the start."""


def validation_of(data: dict[str, Any]) -> Row | None:
    """Pass rate with its standard error, and [pass rate, standard error] of each family; None without a validation."""
    if f"{VALIDATION}pass_rate" not in data:
        return None
    families = {}
    for key, value in data.items():
        family = key.removeprefix(VALIDATION + FAMILY).removesuffix("/pass_rate")
        if key == f"{VALIDATION}{FAMILY}{family}/pass_rate":
            families[family] = [value, data[f"{VALIDATION}{FAMILY}{family}/stderr"]]
    return {
        "pass_rate": data[f"{VALIDATION}pass_rate"],
        "stderr": data[f"{VALIDATION}stderr"],
        "families": dict(sorted(families.items())),
        **{name: data.get(key) for name, key in METRICS.items()},
    }


def speed_of(steps: Sequence[Row]) -> Row:
    """Seconds of a step, p20, p50 and p80, and tokens sampled a second of steps; nothing before the first step.

    The first two steps are left out: they compile kernels. verl's step does not hold its validation, nor does TRL's.
    """
    timed = [step for step in steps if "timing_s/step" in step][2:]
    if len(timed) < 2:
        return {}
    sampled = [step["scalerl/compute/generated_tokens"] for step in timed]
    seconds = [step["timing_s/step"] for step in timed]
    in_order = sorted(seconds)
    quantiles = {f"step_s_p{q}": in_order[min(len(seconds) - 1, q * len(seconds) // 100)] for q in (20, 50, 80)}
    return {**quantiles, "tokens_per_s": (sampled[-1] - sampled[0]) / sum(seconds[1:])}


def rows_of(run: Path, facts: Row, steps: int) -> list[Row]:
    """A row a validation of the run in a folder; the note of one that did not reach its last step says so.

    Args:
        run: holds metrics.jsonl and settings.json.
        facts: of the machine, the software and the command, the same in every row.
        steps: that the run was to have.

    Raises:
        ValueError: no validation was logged.
    """
    lines: dict[int, Row] = {}
    for line in read_records(run / "metrics.jsonl"):
        lines.setdefault(line["step"], {}).update(line["data"])
    found = {step: validation_of(data) for step, data in lines.items()}
    for step, values in found.items():
        if values:
            values |= speed_of([data for number, data in lines.items() if number <= step])
    settings = json.loads((run / "settings.json").read_text(encoding="utf-8"))
    case = {name: settings[name] for name in ("config", "preset", "overrides", "seed")}
    last = max(found, default=0)
    notes = [facts.get("note"), f"ended after step {last} of {steps}" if last < steps else None]
    impl = settings.get("impl", "scalerl_verl")
    common = {**facts, "note": "; ".join(filter(None, notes)), "impl": impl, "unit": "fraction"}
    rows = [{**common, "case": {**case, "step": step}, **values} for step, values in found.items() if values]
    if not rows:
        raise ValueError(f"{run / 'metrics.jsonl'} has no {VALIDATION}pass_rate: train with a preset of ours")
    return rows


def given_facts(arguments: argparse.Namespace) -> Row:
    """What the command line says of the machine, over what this one is.

    Raises:
        ValueError: another machine without its versions and its commit, or a version without a package.
    """
    facts: Row = {"num_devices": arguments.devices, "command": arguments.command}
    if arguments.hardware:
        if not arguments.versions or not arguments.commit:
            raise ValueError("--hardware is of another machine: give --versions and --commit of the run, too")
        facts["hardware"] = arguments.hardware
    elif arguments.gpu:
        facts |= describe_gpu()
    pairs = [text.partition("=") for text in arguments.versions]
    if any(not version for _, _, version in pairs):
        raise ValueError(f"--versions {' '.join(arguments.versions)}: give PACKAGE=VERSION")
    if pairs:
        facts["versions"] = {name: version for name, _, version in pairs}
    if arguments.commit:
        facts |= {"commit": arguments.commit, "dirty": False}
    return facts | {name: value for name in ("driver", "note") if (value := getattr(arguments, name))}


def main(argv: list[str] | None = None) -> int:
    """Record the runs of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders with metrics.jsonl and settings.json")
    parser.add_argument("--steps", type=int, required=True, help="that a run was to have")
    parser.add_argument("--command", default="bash recipes/smollm2-reasoning/run.sh", help="that made them")
    parser.add_argument("--devices", type=int, default=1, help="default %(default)s")
    parser.add_argument("--gpu", action="store_true", help="note this host's GPU instead of its processor")
    parser.add_argument("--hardware", help="of another machine, such as 'NVIDIA H200, 140 GiB'")
    parser.add_argument("--driver", help="of its GPU")
    parser.add_argument("--versions", nargs="+", default=[], metavar="PACKAGE=VERSION", help="there")
    parser.add_argument("--commit", help="that ran there, whole")
    parser.add_argument("--note", help="what else a reader must know")
    arguments = parser.parse_args(argv)
    try:
        given = given_facts(arguments)
        rows = [
            row
            for run in arguments.runs
            for row in rows_of(run, run_facts(uuid.uuid4().hex[:12]) | given, arguments.steps)
        ]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    append_rows(BENCH, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
