# SPDX-License-Identifier: Apache-2.0
"""verl's real config, composed through Hydra with our presets, for tests of the start-up check."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Any

import verl  # noqa: F401 - loads the plugin, which puts our presets on Hydra's search path
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from scalerl_verl.config.checks import find_problems
from scalerl_verl.names import ACTOR as ACTOR
from scalerl_verl.names import CORRECTION as CORRECTION
from scalerl_verl.names import HEAD_BACKEND
from scalerl_verl.names import HEAD_DTYPE as HEAD_DTYPE
from scalerl_verl.names import MODEL as MODEL
from scalerl_verl.names import ROLLOUT as ROLLOUT
from scalerl_verl.names.asking import asked_names

HEAD = HEAD_BACKEND

Refusal = tuple[str, dict[str, Any], list[str]]
"""Preset, values replaced in it, and what the one problem found must say."""


@functools.cache
def _compose(*overrides: str) -> DictConfig:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


def compose_config(*overrides: str) -> DictConfig:
    return copy.deepcopy(_compose(*overrides))


def changed(preset: str, changes: dict[str, Any]) -> DictConfig:
    """The composed config with a preset, some of its values replaced afterwards."""
    config = compose_config(*([f"+scalerl={preset}"] if preset else []))
    with open_dict(config):
        for path, value in changes.items():
            OmegaConf.update(config, path, value, force_add=True)
    return config


def with_overrides(config: DictConfig, overrides: Iterable[str]) -> DictConfig:
    """A composed config with overrides of values, as Hydra applies them, without composing it anew.

    Presets are groups, so a line of a user's replaces what they say, wherever it stands.
    """
    with open_dict(config):
        for override in map(OverridesParser.create().parse_override, overrides):
            path = override.key_or_group
            if override.is_delete():
                section, _, leaf = path.rpartition(".")
                del OmegaConf.select(config, section)[leaf]
            else:
                OmegaConf.update(config, path, override.value(), force_add=True)
    return config


def check_refusal(preset: str, changes: dict[str, Any], fragments: list[str]) -> None:
    """Assert that exactly one problem is found, in these words, in a run that counts as one of ours."""
    config = changed(preset, changes)
    problems = find_problems(config)
    assert len(problems) == 1, problems
    assert all(fragment in problems[0] for fragment in fragments), problems[0]
    assert asked_names(config), "a run that is refused for a name of ours must count as one of ours"
