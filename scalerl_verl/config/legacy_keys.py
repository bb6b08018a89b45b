# SPDX-License-Identifier: Apache-2.0
"""Keys of earlier verl versions that still compose and are read by nothing in the V1 trainer.

verl keeps three sections of the old reward configuration, all null, and has a function that moves them to their new
places; its V1 trainer does not call it. A fourth, `reward_manager`, is gone, but a YAML file may bring it. A launch
script of verl 0.7 would be graded by another reward than its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from scalerl_verl.config.reward_checks import MANAGER, TAKES_PLACE
from scalerl_verl.names import select
from scalerl_verl.names.reading import leaves

_RENAMED = {
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_loop_source": "reward.reward_manager.source",
    "reward_model.reward_loop_module_path": "reward.reward_manager.module.path",
    "reward_model.reward_loop_class_name": "reward.reward_manager.module.name",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.path": "reward.reward_model.model_path",
}
_MOVED = {
    "reward_model.rollout.": "reward.reward_model.rollout.",
    "reward_model.reward_kwargs.": "reward.reward_kwargs.",
    "reward_model.overlong_buffer.": "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.n_gpus_per_node": "reward.reward_model.n_gpus_per_node",
    "reward_model.nnodes": "reward.reward_model.nnodes",
    "reward_manager.": "reward.reward_manager.",
    "custom_reward_function.": "reward.custom_reward_function.",
    "sandbox_fusion.": "reward.sandbox_fusion.",
}
"""Beginning of an old key -> beginning of the new one; what follows stays."""
_SECTIONS = ("reward_model", "reward_manager", "custom_reward_function", "sandbox_fusion")


def find_problems(config: DictConfig) -> Iterator[str]:
    """Every old reward key that has a value, with the key to set instead."""
    for section in _SECTIONS:
        content = select(config, section)
        if isinstance(content, DictConfig):
            content = OmegaConf.to_container(content, resolve=False)
        for key, value in leaves(section, content):
            if value is None:
                continue
            new = new_key(key)
            # What has no manager of its name would be refused in a second try.
            wanted = TAKES_PLACE.get(str(value), value) if new == MANAGER else value
            change = f"set {new}={wanted} instead" if new else f"nothing takes its place, delete it (~{key})"
            yield f"{key}={value} has no effect: verl's V1 trainer reads no key of {section}; {change}"


def new_key(key: str) -> str | None:
    """Where verl 0.9 reads what an old reward key said; None if nowhere."""
    if key in _RENAMED:
        return _RENAMED[key]
    for old, new in _MOVED.items():
        if key.startswith(old):
            return new + key.removeprefix(old)
    return None
