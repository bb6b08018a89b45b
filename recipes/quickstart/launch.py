# SPDX-License-Identifier: Apache-2.0
"""Launch verl's main_ppo with ``+scalerl=quickstart``, show its progress, clean up, and write the report.

run.sh calls this; it needs nothing beyond the prepared environment and data.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from folder_lock import lock_folder
from launch_line import build_command, build_environment
from progress import explain_failure
from run_files import LaunchError, Paths, choose_checkpoint, merge_attempts, start_files
from supervise import run_training

from scalerl_verl.terminal import accept_any_text

HERE = Path(__file__).resolve().parent


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line; everything after ``--`` goes to main_ppo."""
    parser = argparse.ArgumentParser(prog="launch.py", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder made by prepare.py")
    parser.add_argument("--out", type=Path, required=True, help="where summary.json and learning_curve.png go")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps (default: the preset's)")
    parser.add_argument("--fresh", action="store_true", help="start anew even if an interrupted run could be resumed")
    parser.add_argument("--started-at", type=float, default=time.time(), help="Unix time the user began to wait")
    parser.add_argument("overrides", nargs="*", help="further Hydra overrides")
    return parser.parse_args(argv)


def say(text: str) -> None:
    """A line of the launcher's own."""
    print(f"quickstart: {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    accept_any_text()
    arguments.data, arguments.out = arguments.data.resolve(), arguments.out.resolve()
    paths = Paths(arguments.out)
    run_id = uuid.uuid4().hex
    settings = {"seed": arguments.seed, "steps": arguments.steps, "overrides": arguments.overrides}
    try:
        paths.out.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(paths.out, run_id, say)
        say(start_files(paths, arguments.fresh, settings))
    except OSError as error:
        print(f"error: --out {paths.out} cannot be written: {error}")
        return 1
    except LaunchError as error:
        print(f"error: {error}")
        return 1
    code, peak_gib = run_training(
        build_command(arguments, paths), build_environment(paths, run_id), paths, run_id, lock
    )
    if code != 0:
        if code == 130:
            if choose_checkpoint(paths):
                print("re-run to resume from the last checkpoint, or with --fresh to start anew")
            else:
                print("no checkpoint was saved yet: a re-run starts anew")
        else:
            explain_failure(paths)
        return code
    try:
        merge_attempts(paths)
    except LaunchError as error:
        print(f"error: {error}")
        return 1
    paths.finished.touch()
    wall_s = time.time() - arguments.started_at
    report = [sys.executable, str(HERE / "report.py"), "--run-dir", str(paths.run), "--out", str(paths.out)]
    report += ["--wall-seconds", f"{wall_s:.1f}", "--peak-gib", f"{peak_gib:.2f}", "--seed", str(arguments.seed)]
    return subprocess.run(report, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
