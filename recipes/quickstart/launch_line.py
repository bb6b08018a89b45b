# SPDX-License-Identifier: Apache-2.0
"""Command line and environment of the run."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from run_files import Paths

from scalerl_verl.reap import run_marks

HERE = Path(__file__).resolve().parent


def quote(value: object) -> str:
    """``value`` as a quoted string of Hydra's override grammar: paths may hold any character."""
    # Backslashes are literal, except in front of a quote, where each is doubled.
    text = re.sub(r"(\\*)'", lambda match: match[1] * 2 + "\\'", str(value))
    trailing = len(text) - len(text.rstrip("\\"))
    return f"'{text}{text[len(text) - trailing :]}'"


def build_command(arguments: argparse.Namespace, paths: Paths) -> list[str]:
    """The launch line: verl's own entry point, our preset, and this run's files."""
    data = arguments.data
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        "+scalerl=quickstart",
        f"data.train_files={quote(data / 'train.parquet')}",
        f"data.val_files={quote(data / 'test.parquet')}",
        f"data.seed={arguments.seed}",
        f"actor_rollout_ref.model.path={quote(data / 'model')}",
        f"actor_rollout_ref.rollout.seed={arguments.seed}",
        f"actor_rollout_ref.actor.fsdp_config.seed={arguments.seed}",
        f"reward.custom_reward_function.path={quote(HERE / 'reward.py')}",
        f"trainer.default_local_dir={quote(paths.run / 'checkpoints')}",
        f"trainer.validation_data_dir={quote(paths.run / 'validation')}",
        "trainer.resume_mode=auto",
        # A cluster of this run's own, whatever else runs on this machine.
        "+ray_kwargs.ray_init.address=local",
        f"hydra.run.dir={quote(paths.run / 'hydra')}",
    ]
    if arguments.steps is not None:
        command.append(f"trainer.total_training_steps={arguments.steps}")
    return command + arguments.overrides


def build_environment(paths: Paths, run_id: str) -> dict[str, str]:
    """The environment of the run: CPU platform, one thread a process, nothing downloaded."""
    cpu = {
        "VERL_PLATFORM": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "HF_HUB_OFFLINE": "1",
    }
    return {**run_environment(paths, run_id), **cpu}


def run_environment(paths: Paths, run_id: str) -> dict[str, str]:
    """The environment of any recipe's run: this shell's, the run's id, its metrics file, no usage reports."""
    run = {
        **run_marks(run_id),
        "VERL_FILE_LOGGER_PATH": str(paths.metrics),
        "SCALERL_VERL_STATUS_DIR": str(paths.run / "processes"),
        "VERL_LOGGING_LEVEL": "WARN",
        "PYTHONUNBUFFERED": "1",
        "HYDRA_FULL_ERROR": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**inherited, **run}
