# SPDX-License-Identifier: Apache-2.0
"""Throughput of pipeline_rl (keep, recompute), verl's separate_async and verl's sync, and the simulator's view.

python -m benchmarks.pipeline.bench --mode sync                    two CPU cores, a random tiny model
python -m benchmarks.pipeline.bench --mode "pipeline_rl keep" --gpus 0,1 --run-id a --work OUT --seconds 400
python -m benchmarks.pipeline.bench --lanes "pipeline_rl keep@0,1;pipeline_rl keep:plain@0,1;sync:2B@0,1"
                                                   several, started together and measured in turns: the table
python -m benchmarks.pipeline.bench --from OUT                     rows of a run that was cut off
python -m benchmarks.pipeline.bench --predict a                    the simulator, from the rows of run-id a

One mode an invocation; those with the same --run-id are compared. Two may run at a time on other GPUs of one host.

Each run trains a random model on two kinds of prompts, one after the other: generation-bound (long, uneven responses)
and trainer-bound (long prompts, short responses). Lengths are drawn, from the same distribution in every mode, since a
random model has none of its own. Batches in which the two kinds, or the start or the end of the run, could mix are left
out. sync uses all devices for generation and training in turns, the other modes the last of them for generation.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import uuid
from dataclasses import asdict
from pathlib import Path

from benchmarks.launching import log_tail, read_steps
from benchmarks.pipeline.assets import SIZES, make_model, make_prompts
from benchmarks.pipeline.lanes import parse_lanes, run_lanes
from benchmarks.pipeline.measure import rows_of
from benchmarks.pipeline.predict import predicted_rows
from benchmarks.pipeline.runs import MODES, Plan, launch
from benchmarks.rows import append_rows, describe_gpu, read_rows, run_facts

BENCH = "pipeline"


def run(plan: Plan, size_name: str, folder: Path, assets: Path, facts: dict) -> int:
    """Make what is needed, run, print how it ended; the exit code."""
    size = SIZES[size_name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(
        json.dumps({"plan": asdict(plan), "size": size_name, "facts": facts}), encoding="utf-8"
    )
    if not (assets / "model").exists():
        (assets / "model").mkdir(parents=True)
        make_model(assets / "model", size)
    # towards the end modes other than ours start what will not train: some batches more than the steps take
    spare = plan.lead + 1
    make_prompts(assets, size, (plan.steps[0] * size.prompts, (plan.steps[1] + spare) * size.prompts))
    code = launch(plan, size, assets, folder)
    num_steps = len(read_steps(folder))
    if code == 0:
        print(f"{plan.mode}: {num_steps} steps", flush=True)
        return 0
    how = f"ended after {plan.seconds:g} s" if code is None else f"ended by itself with {code}"
    print(f"{plan.mode}: {how}, {num_steps} of {sum(plan.steps)} steps", flush=True)
    if code is not None:
        print(log_tail(folder), flush=True)
    return 0 if num_steps else 1


def write_rows(folder: Path, out: Path | None) -> None:
    """Rows of the run in ``folder``, appended to the results or to ``out``, and their most important numbers shown."""
    stored = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    plan = Plan(**{key: tuple(value) if isinstance(value, list) else value for key, value in stored["plan"].items()})
    rows = rows_of(folder, plan, SIZES[stored["size"]], stored["facts"])
    for row in rows:
        if row["metric"] in ("trained_tokens_per_s", "generator_idle_fraction", "pause_s", "step_s"):
            print(f"{row['case']['regime']:18} {row['impl']:22} {row['metric']:24} {row['p50']:.4g}", flush=True)
    append_rows(BENCH, rows, out)


def lanes(arguments: argparse.Namespace) -> int:
    """Run ``--lanes``; the rows of all have one run id."""
    folder = arguments.work or Path(tempfile.mkdtemp(prefix="bench_pipeline_"))
    parsed = parse_lanes(arguments.lanes, folder)
    shared = ["--run-id", arguments.run_id, "--k", str(arguments.k), "--trainer-gpus", str(arguments.trainer_gpus)]
    shared += ["--out", str(arguments.out.resolve())] if arguments.out else []
    options = {
        lane.mode: [*shared, "--steps", arguments.sync_steps if lane.mode == "sync" else arguments.steps]
        for lane in parsed
    }
    run_lanes(parsed, options, arguments.boot_seconds, arguments.seconds, arguments.after)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--lanes", help="several modes with their devices, MODE@GPUS;MODE@GPUS")
    parser.add_argument("--boot-seconds", type=float, default=600, help="of all lanes together, until they can work")
    parser.add_argument("--after", type=Path, help="file without which no lane begins to work, with --lanes")
    parser.add_argument("--gate", default="", help="file without which the run waits before its first request")
    parser.add_argument("--sync-steps", default="8,8", help="of the two regimes, with --lanes: sync's are longer")
    parser.add_argument("--gpus", default="", help="CUDA devices, such as 0,1; default: the CPU")
    parser.add_argument("--trainer-gpus", type=int, default=1)
    parser.add_argument("--steps", default="38,38", help="of the two regimes")
    parser.add_argument("--size", choices=SIZES, help="of model and load; default: 0.28B on GPUs, else cpu")
    parser.add_argument("--plain", action="store_true", help="without the fast front end")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3600, help="after which the run is ended and measured")
    parser.add_argument("--work", type=Path, help="folder of the run; default: a temporary one")
    parser.add_argument("--assets", type=Path, help="where model and data are made; default: in the run's folder")
    parser.add_argument("--run-id", default=uuid.uuid4().hex[:12])
    parser.add_argument("--out", type=Path, help="file for the rows; default: benchmarks/results")
    parser.add_argument("--from", type=Path, dest="from_folder", help="rows of a run that is over")
    parser.add_argument("--predict", metavar="RUN_ID", help="rows of the simulator from those of a run")
    parser.add_argument("more", nargs="*", help="further overrides")
    arguments = parser.parse_args()
    if arguments.from_folder:
        write_rows(arguments.from_folder, arguments.out)
        return 0
    if arguments.predict:
        append_rows(BENCH, predicted_rows([r for r in read_rows(BENCH) if r["run_id"] == arguments.predict]))
        return 0
    if arguments.lanes:
        return lanes(arguments)
    if not arguments.mode:
        parser.error("one of --mode, --lanes, --from and --predict is needed")
    gpus = tuple(int(number) for number in arguments.gpus.split(",") if number)
    steps = tuple(int(number) for number in arguments.steps.split(","))
    facts = run_facts(arguments.run_id)
    facts |= describe_gpu() | {"num_devices": len(gpus)} if gpus else {}
    plan = Plan(
        arguments.mode,
        gpus,
        arguments.trainer_gpus,
        arguments.k,
        steps,
        arguments.seconds,
        tuple(arguments.more),
        arguments.gate,
        arguments.plain,
    )
    folder = arguments.work or Path(tempfile.mkdtemp(prefix="bench_pipeline_"))
    code = run(
        plan, arguments.size or ("0.28B" if gpus else "cpu"), folder, arguments.assets or folder / "assets", facts
    )
    write_rows(folder, arguments.out)
    return code


if __name__ == "__main__":
    sys.exit(main())
