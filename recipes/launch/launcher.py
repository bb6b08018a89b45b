# SPDX-License-Identifier: Apache-2.0
"""The launcher of every recipe: lock, data, run, report."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from recipes.launch.command import build_command, build_environment, parse_arguments, settings_of, shell_environment
from recipes.launch.folder import (
    INTERRUPTED,
    LaunchError,
    Paths,
    begin_attempt,
    choose_checkpoint,
    end_attempt,
    merge_attempts,
    start_files,
)
from recipes.launch.lock import FolderLock, lock_folder
from recipes.launch.progress import explain_failure
from recipes.launch.supervise import run_training
from scalerl_verl.terminal import accept_any_text


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe; returns the exit code."""
    arguments = parse_arguments(argv)
    accept_any_text()
    paths = Paths(arguments.out)
    if not (arguments.recipe / f"{arguments.config}.yaml").is_file():
        return _refuse(f"{arguments.recipe} has no {arguments.config}.yaml: give --config one of its configs")
    if arguments.print:
        print(shlex.join(build_command(arguments, paths)))
        return 0
    run_id = uuid.uuid4().hex
    try:
        paths.out.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(paths.out, run_id, _say)
    except OSError as error:
        return _refuse(f"--out {paths.out} cannot be written: {error}")
    except LaunchError as error:
        return _refuse(error)
    try:
        if paths.finished.exists() and not (arguments.fresh or arguments.again):
            _say(f"{paths.out} holds a finished run: --fresh starts anew")
            return 0
        return _attempt(arguments, paths, run_id, lock)
    finally:
        lock.close()


def _attempt(arguments: argparse.Namespace, paths: Paths, run_id: str, lock: FolderLock) -> int:
    """One attempt, noted in the folder; returns the exit code."""
    begin_attempt(paths)
    code = 1
    try:
        code = _launch(arguments, paths, run_id, lock)
    except (LaunchError, OSError) as error:
        _refuse(error)
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        end_attempt(paths, code)
    return code


def _launch(arguments: argparse.Namespace, paths: Paths, run_id: str, lock: FolderLock) -> int:
    """Data, training, report; returns the exit code.

    Raises:
        LaunchError: the run cannot start, or did not leave what the report needs.
    """
    prepare_data(arguments.recipe, arguments.data, arguments.seed, arguments.cpu)
    _say(start_files(paths, arguments.fresh, settings_of(arguments)))
    # What data made with a model of their own add to the line is only known now.
    command = build_command(arguments, paths)
    code, peak_gib = run_training(command, build_environment(paths, run_id, arguments.cpu), paths, run_id, lock.run)
    if code:
        if code != INTERRUPTED:
            explain_failure(paths)
        elif choose_checkpoint(paths):
            print("re-run to resume from the last checkpoint, or with --fresh to start anew")
        else:
            print("no checkpoint was saved yet: a re-run starts anew")
        return code
    merge_attempts(paths)
    paths.finished.touch()
    return _report(arguments, paths, time.time() - arguments.started_at, peak_gib)


def prepare_data(recipe: Path, data: Path, seed: int, cpu: bool = False) -> None:
    """Make the recipe's data unless they are there.

    Raises:
        LaunchError: they could not be made.
    """
    if all((data / name).is_file() for name in ("train.parquet", "test.parquet")):
        return
    environment = {**shell_environment(cpu), "PYTHON": sys.executable}
    done = subprocess.run(["bash", str(recipe / "prepare.sh"), str(data), str(seed)], env=environment, check=False)
    if done.returncode:
        raise LaunchError(f"{recipe / 'prepare.sh'} {data} {seed} ended with code {done.returncode}, see above")


def _report(arguments: argparse.Namespace, paths: Paths, wall_s: float, peak_gib: float) -> int:
    """The recipe's own report, if it has one; returns the exit code."""
    script = arguments.recipe / "report.py"
    if not script.is_file():
        _say(f"done: scalerl fit {paths.run}")
        return 0
    report = [sys.executable, str(script), "--run-dir", str(paths.run), "--out", str(paths.out)]
    report += ["--wall-seconds", f"{wall_s:.1f}", "--peak-gib", f"{peak_gib:.2f}", "--seed", str(arguments.seed)]
    return subprocess.run(report, check=False).returncode


def _say(text: str) -> None:
    print(text, flush=True)


def _refuse(error: object) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 1
