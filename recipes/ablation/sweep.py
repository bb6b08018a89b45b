# SPDX-License-Identifier: Apache-2.0
"""Run an ablation: every run of a sweep file once, one after the other.

    python recipes/ablation/sweep.py --list                 # runs and their states
    python recipes/ablation/sweep.py                        # work; call again after whatever ended it
    python recipes/ablation/sweep.py --only leave_one_out   # a part; --only '*/seed0' for one seed
    python recipes/ablation/sweep.py --collect              # results.jsonl, and curves for `scalerl compare`

State is on disk (--out): a run that was interrupted or killed resumes from its checkpoint, a failed one is marked and
left until --retry-failed, a finished one is never run again. Exit code 0: all runs chosen are finished; 3: some failed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder, whose modules have plain names

from recipes.ablation.collect import collect
from recipes.ablation.runner import describe, lock_queue, run_folder, work
from recipes.ablation.spec import Run, SweepError, choose, read_sweep

HERE = Path(__file__).resolve().parent
FAILED = 3


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="sweep.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", type=Path, default=HERE / "sweep.yaml", help="sweep file (default: beside this)")
    parser.add_argument(
        "--out", type=Path, help="default: outputs/ablation, of another sweep file outputs/ablation-NAME"
    )
    parser.add_argument("--recipe", help="folder below recipes/ in place of the sweep's")
    parser.add_argument("--data", type=Path, help="folder with train.parquet and test.parquet of all runs")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="runs or groups to work on")
    parser.add_argument("--retry-failed", action="store_true", help="start failed runs again, too")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="print runs and states")
    what.add_argument("--print", action="store_true", help="print the commands")
    what.add_argument("--collect", action="store_true", help="write the results of finished runs")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Do as asked; returns the exit code."""
    arguments = parse_arguments(argv)
    # files of their own: runs of two sweeps may have one name
    name = "ablation" if arguments.sweep.stem == "sweep" else f"ablation-{arguments.sweep.stem}"
    out = (arguments.out or HERE.parents[1] / "outputs" / name).resolve()
    try:
        runs = choose(read_sweep(arguments.sweep, arguments.recipe), arguments.only)
        return _act(arguments, runs, out)
    except (SweepError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: call again to resume", file=sys.stderr)
        return 130


def _act(arguments: argparse.Namespace, runs: Sequence[Run], out: Path) -> int:
    if arguments.list:
        width = max(len(run.name) for run in runs)
        print("\n".join(f"{run.name:<{width}}  {describe(out, run)}" for run in runs))
        return 0
    if arguments.print:
        print("\n".join(shlex.join(run.command(run_folder(out, run), arguments.data)) for run in runs))
        return 0
    if arguments.collect:
        path, num_runs = collect(runs, out)
        print(f"{path}: {num_runs} finished runs of {len(runs)}; scalerl compare {out / 'curves'}/*.jsonl")
        return 0
    lock = lock_queue(out)
    try:
        num_failed = work(runs, out, arguments.data, arguments.retry_failed, lambda text: print(text, flush=True))
        return FAILED if num_failed else 0
    finally:
        lock.close()


if __name__ == "__main__":
    sys.exit(main())
