# SPDX-License-Identifier: Apache-2.0
"""Run a recipe: data, then verl's main_ppo with the recipe's config, resumed if it was interrupted.

A recipe is a folder with `config.yaml` (and more configs beside it) and `prepare.sh`, which makes its data. The result
is in --out: `run/metrics.jsonl` for `scalerl fit`, `run/checkpoints`, `run/validation`, `run/train.log`. What
comes after `--` goes to main_ppo, last. A finished run is not run again; --fresh starts anew.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[1]
# The quickstart's launcher is made of scripts beside each other; a run's folder, lock and end are the same here.
sys.path.insert(0, str(RECIPES / "quickstart"))

from folder_lock import lock_folder  # noqa: E402
from launch_line import quote, run_environment  # noqa: E402
from progress import explain_failure  # noqa: E402
from run_files import LaunchError, Paths, merge_attempts, start_files  # noqa: E402
from supervise import run_training  # noqa: E402

from scalerl_verl.terminal import accept_any_text  # noqa: E402

RECIPES_ENV = "SCALERL_RECIPES"
"""Folder of the recipes: configs name the reward function below it."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line; everything after ``--`` goes to main_ppo."""
    parser = argparse.ArgumentParser(
        prog="run.sh",
        usage="run.sh [options] [-- overrides of main_ppo]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", type=Path, help="the recipe's folder (run.sh gives its own)")
    parser.add_argument("--config", default="config", help="config of the recipe, without .yaml (default: config)")
    parser.add_argument("--preset", action="append", default=[], help="preset of ours in front of the config")
    parser.add_argument("--out", type=Path, help="where the run goes (default: outputs/<recipe>)")
    parser.add_argument("--data", type=Path, help="folder with train.parquet and test.parquet (default: made there)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="start anew even if there is something to resume")
    parser.add_argument("--print", action="store_true", help="print the launch line and do nothing")
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    arguments = parser.parse_args(given[:end])
    arguments.overrides = given[end + 1 :]
    return arguments


def build_command(arguments: argparse.Namespace, paths: Paths) -> list[str]:
    """The launch line: verl's own entry point, the recipe's config, and this run's files."""
    recipe, data = arguments.recipe.resolve(), arguments.data
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-dir", str(recipe.parent)]
    if arguments.preset:
        command.append(f"+scalerl=[{','.join(arguments.preset)}]")
    command += [
        f"+{recipe.name}={arguments.config}",
        f"data.train_files={quote(data / 'train.parquet')}",
        f"data.val_files={quote(data / 'test.parquet')}",
        f"data.seed={arguments.seed}",
        f"actor_rollout_ref.rollout.seed={arguments.seed}",
        f"actor_rollout_ref.actor.fsdp_config.seed={arguments.seed}",
        f"trainer.experiment_name={quote(f'{recipe.name}-{arguments.config}-seed{arguments.seed}')}",
        f"trainer.default_local_dir={quote(paths.run / 'checkpoints')}",
        f"trainer.validation_data_dir={quote(paths.run / 'validation')}",
        "trainer.resume_mode=auto",
        f"hydra.run.dir={quote(paths.run / 'hydra')}",
        # The config is resolved on whatever node runs the driver.
        f"++ray_kwargs.ray_init.runtime_env.env_vars.{RECIPES_ENV}={quote(RECIPES)}",
    ]
    if (data / "model" / "config.json").is_file():
        command.append(f"actor_rollout_ref.model.path={quote(data / 'model')}")
    if not os.environ.get("RAY_ADDRESS"):
        # A cluster of this run's own, whatever else runs on this machine.
        command.append("+ray_kwargs.ray_init.address=local")
    return command + arguments.overrides


def prepare_data(recipe: Path, data: Path, seed: int) -> None:
    """Make the recipe's data unless they are there.

    Raises:
        LaunchError: they could not be made.
    """
    if all((data / name).is_file() for name in ("train.parquet", "test.parquet")):
        return
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(["bash", str(recipe / "prepare.sh"), str(data), str(seed)], env=environment, check=False)
    if done.returncode:
        raise LaunchError(f"{recipe / 'prepare.sh'} {data} {seed} ended with code {done.returncode}, see above")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe; returns the exit code."""
    arguments = parse_arguments(argv)
    accept_any_text()
    recipe = arguments.recipe.resolve()
    outputs = RECIPES.parent / "outputs"
    arguments.data = (arguments.data or outputs / "data" / f"{recipe.name}-seed{arguments.seed}").resolve()
    paths = Paths((arguments.out or outputs / recipe.name).resolve())
    if not (recipe / f"{arguments.config}.yaml").is_file():
        print(f"error: {recipe} has no {arguments.config}.yaml: give --config one of its configs", file=sys.stderr)
        return 1
    command = build_command(arguments, paths)
    if arguments.print:
        print(shlex.join(command))
        return 0
    run_id = uuid.uuid4().hex
    settings = {name: getattr(arguments, name) for name in ("config", "preset", "seed", "overrides")}
    try:
        paths.out.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(paths.out, run_id, print)
        if paths.finished.exists() and not arguments.fresh:
            print(f"{paths.out} holds a finished run: --fresh starts anew")
            return 0
        prepare_data(recipe, arguments.data, arguments.seed)
        print(start_files(paths, arguments.fresh, settings))
    except (LaunchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    environment = {**run_environment(paths, run_id), RECIPES_ENV: str(RECIPES)}
    # What data made with a model of their own add to the line is only known now.
    code, _ = run_training(build_command(arguments, paths), environment, paths, run_id, lock)
    if code:
        if code != 130:
            explain_failure(paths)
        print("re-run to resume from the last checkpoint, if one was saved")
        return code
    merge_attempts(paths)
    paths.finished.touch()
    print(f"done: scalerl fit {paths.run}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
