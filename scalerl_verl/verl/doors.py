# SPDX-License-Identifier: Apache-2.0
"""How verl finds our trainer and our agent loops: names in the config, put there after the checks.

verl's own doors are two keys, the trainer's mode and the class of the agent loop manager. In a run that uses our names
the driver points both at classes of ours; each of these puts back what the user typed as soon as verl has made it. So
everything that reads the config afterwards (verl's sections by mode, our pieces, trackers) sees the user's names.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from scalerl_verl.names import AGENT_LOOP_MANAGER, TRAINER_MODE, VERL_MODES, select

TRAINERS = {mode: f"scalerl_{mode}" for mode in VERL_MODES}
"""verl's mode -> the name under which its trainer with our steps is registered. pipeline_rl and ppo_off_policy are ours
under their own names; any other is left to verl."""
_WORKERS = "scalerl_verl.verl.agent_worker"
MANAGER = f"{_WORKERS}.AgentLoopManager"
AROUND = "around:"
"""Beginning of the name of a class that is made around a manager of the user's: ``around:package:module:Class``."""


def point_at_ours(config: DictConfig) -> None:
    """Point verl's two keys at our classes."""
    mode, manager = str(select(config, TRAINER_MODE, "sync")), select(config, AGENT_LOOP_MANAGER)
    _put(config, TRAINER_MODE, TRAINERS.get(mode, mode))
    _put(
        config,
        AGENT_LOOP_MANAGER,
        MANAGER if not manager else f"{_WORKERS}.{AROUND}{str(manager).replace('.', ':')}",
    )


def restore_mode(config: DictConfig) -> None:
    """Put back the trainer mode that the user typed."""
    mode = select(config, TRAINER_MODE)
    typed = [name for name, ours in TRAINERS.items() if ours == mode]
    if typed:
        _put(config, TRAINER_MODE, typed[0])


def restore_manager(config: DictConfig) -> None:
    """Put back the class of the agent loop manager that the user typed, or None."""
    name = str(select(config, AGENT_LOOP_MANAGER, "")).removeprefix(f"{_WORKERS}.")
    if name == MANAGER.removeprefix(f"{_WORKERS}."):
        _put(config, AGENT_LOOP_MANAGER, None)
    elif name.startswith(AROUND):
        _put(config, AGENT_LOOP_MANAGER, typed_class(name))


def typed_class(name: str) -> str:
    """The path of the user's class in a name that begins with `AROUND`."""
    return name.removeprefix(AROUND).replace(":", ".")


def _put(config: DictConfig, path: str, value: Any) -> None:
    with open_dict(config):
        OmegaConf.update(config, path, value, force_add=True)
