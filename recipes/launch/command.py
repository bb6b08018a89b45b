# SPDX-License-Identifier: Apache-2.0
"""What the launcher is asked, and the command line and environment that it makes of it."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from recipes.launch.folder import Paths
from recipes.launch.processes import run_marks

RECIPES = Path(__file__).resolve().parents[1]
RECIPES_ENV = "SCALERL_RECIPES"
"""Folder of the recipes: configs name the reward function below it."""
CPU_CONFIG = "cpu"
CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""Of a run without a GPU, unless this shell says otherwise."""
DESCRIPTION = """Run a recipe: data, then verl's main_ppo with the recipe's config, resumed if it was interrupted.

A recipe is a folder with `config.yaml` (and more configs beside it) and `prepare.sh`, which makes its data. The result
is in --out: `run/metrics.jsonl` for `scalerl fit`, `run/checkpoints`, `run/validation`, `run/train.log`; a recipe with
a `report.py` has that write a report, too. What comes after `--` goes to main_ppo, last. A finished run is not run
again; --fresh starts anew.
"""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line; everything after ``--`` goes to main_ppo."""
    parser = argparse.ArgumentParser(
        prog="run.sh",
        usage="run.sh [options] [-- overrides of main_ppo]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", type=Path, help="the recipe's folder (run.sh gives its own)")
    parser.add_argument("--config", help="config of the recipe, without .yaml (default: config; with --cpu: cpu)")
    parser.add_argument("--cpu", action="store_true", help="without a GPU: the recipe's config `cpu`")
    parser.add_argument("--preset", action="append", default=[], help="preset of ours in front of the config")
    parser.add_argument("--out", type=Path, help="where the run goes (default: outputs/<recipe>)")
    parser.add_argument("--data", type=Path, help="folder with train.parquet and test.parquet (default: made there)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="optimizer steps of verl (default: the config's)")
    parser.add_argument("--fresh", action="store_true", help="start anew even if there is something to resume")
    parser.add_argument("--again", action="store_true", help="run a finished run again")
    parser.add_argument("--started-at", type=float, default=time.time(), help="Unix time the user began to wait")
    parser.add_argument("--print", action="store_true", help="print the launch line and do nothing")
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    arguments = parser.parse_args(given[:end])
    arguments.overrides = given[end + 1 :]
    arguments.config = arguments.config or (CPU_CONFIG if arguments.cpu else "config")
    arguments.recipe = arguments.recipe.resolve()
    outputs = RECIPES.parent / "outputs"
    made = f"{arguments.recipe.name}-seed{arguments.seed}{'-cpu' if arguments.cpu else ''}"
    arguments.data = (arguments.data or outputs / "data" / made).resolve()
    arguments.out = (arguments.out or outputs / arguments.recipe.name).resolve()
    return arguments


def settings_of(arguments: argparse.Namespace) -> dict[str, object]:
    """What decides a run: an interrupted one is resumed with the same only."""
    names = ("config", "preset", "seed", "steps", "overrides")
    return {"recipe": arguments.recipe.name, **{name: getattr(arguments, name) for name in names}}


def quote(value: object) -> str:
    """``value`` as a quoted string of Hydra's override grammar: paths may hold any character."""
    # Backslashes are literal, except in front of a quote, where each is doubled.
    text = re.sub(r"(\\*)'", lambda match: match[1] * 2 + "\\'", str(value))
    trailing = len(text) - len(text.rstrip("\\"))
    return f"'{text}{text[len(text) - trailing :]}'"


def build_command(arguments: argparse.Namespace, paths: Paths) -> list[str]:
    """The launch line: verl's own entry point, the recipe's config, and this run's files."""
    recipe, data = arguments.recipe, arguments.data
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
    if arguments.steps is not None:
        command.append(f"trainer.total_training_steps={arguments.steps}")
    return command + arguments.overrides


def shell_environment(cpu: bool) -> dict[str, str]:
    """This shell's environment, on a CPU with what verl and vLLM need there."""
    return {**(CPU_ENVIRONMENT if cpu else {}), **os.environ}


def build_environment(paths: Paths, run_id: str, cpu: bool = False) -> dict[str, str]:
    """This shell's environment, the run's id, its metrics file, no usage reports."""
    return {
        **shell_environment(cpu),
        **run_marks(run_id),
        RECIPES_ENV: str(RECIPES),
        "VERL_FILE_LOGGER_PATH": str(paths.metrics),
        "SCALERL_VERL_STATUS_DIR": str(paths.run / "processes"),
        "VERL_LOGGING_LEVEL": "WARN",
        "PYTHONUNBUFFERED": "1",
        "HYDRA_FULL_ERROR": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
