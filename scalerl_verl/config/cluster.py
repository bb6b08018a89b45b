# SPDX-License-Identifier: Apache-2.0
"""Which Ray a run has, its own or one that runs already, and how many devices it takes of it."""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig

from scalerl_verl.names import PPO_OFF_POLICY, RAY, ROLLOUT, select
from scalerl_verl.names.asking import trainer_mode
from scalerl_verl.names.kinds import is_number
from scalerl_verl.names.numbers import number


def cluster_address(config: DictConfig) -> str:
    """``local`` for a Ray of the run's own, else the running one that the run joins.

    The config or ``RAY_ADDRESS`` names it, or ``ray start`` left it running on this machine.
    """
    given = str(select(config, f"{RAY}.address", ""))
    if given not in ("", "auto"):
        return given
    return os.environ.get("RAY_ADDRESS") or _started_here(config) or given or "local"


def _started_here(config: DictConfig) -> str:
    """Address that ``ray start`` noted on this machine (see the docstring of `ray.init`); empty if there is none."""
    folder = select(config, f"{RAY}._temp_dir") or Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray"
    try:
        return (Path(str(folder)) / "ray_current_cluster").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def has_own_ray(config: DictConfig) -> bool:
    """Whether the run starts its Ray itself; the trainer of another one may see other files and devices."""
    return cluster_address(config) == "local"


_POOLS = {"reward.reward_model.enable_resource_pool": "reward.reward_model", "distillation.enabled": "distillation"}
"""Key that gives a model devices of its own -> section with their number."""


def _devices_below(config: DictConfig, section: str) -> int:
    counts = [select(config, f"{section}.{key}", 0) for key in ("nnodes", "n_gpus_per_node")]
    return int(counts[0] * counts[1]) if all(map(is_number, counts)) else 0


def num_devices(config: DictConfig) -> int:
    """Devices of trainer and generators, which share them in synchronous modes, and of models that have their own."""
    trainer = number(config, "trainer.nnodes") * number(config, "trainer.n_gpus_per_node")
    trainer += sum(_devices_below(config, section) for flag, section in _POOLS.items() if select(config, flag, False))
    if trainer_mode(config) in ("sync", PPO_OFF_POLICY):
        return trainer
    return trainer + int(select(config, f"{ROLLOUT}.nnodes", 0)) * int(select(config, f"{ROLLOUT}.n_gpus_per_node", 0))
