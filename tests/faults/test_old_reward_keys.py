# SPDX-License-Identifier: Apache-2.0
"""Reward keys of earlier verl versions compose and are read by nobody: the run would be graded by another reward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

from scalerl_verl.config.legacy_keys import find_problems, new_key
from tests.unit.composed import compose_config

SECTIONS = ("reward_model", "custom_reward_function", "sandbox_fusion")


def leaves(path: str, section: Any) -> list[str]:
    if isinstance(section, dict):
        return [leaf for key, value in section.items() for leaf in leaves(f"{path}.{key}", value)]
    return [path]


def old_keys() -> list[str]:
    config = compose_config()
    return [key for name in SECTIONS for key in leaves(name, OmegaConf.to_container(config[name]))]


def changed(key: str, value: Any) -> DictConfig:
    config = compose_config()
    with open_dict(config):
        OmegaConf.update(config, key, value, force_add=True)
    return config


def test_config_without_old_keys_has_no_problem() -> None:
    assert list(find_problems(compose_config())) == []


@pytest.mark.parametrize("key", old_keys())
def test_old_key_is_refused_with_the_one_that_is_read(key: str) -> None:
    (problem,) = find_problems(changed(key, 7))
    assert problem.startswith(f"{key}=7 has no effect")
    new = new_key(key)
    assert f"set {new}=7 instead" in problem if new else f"delete it (~{key})" in problem
    if new is not None:
        section, _, leaf = new.rpartition(".")
        assert leaf in list(OmegaConf.select(compose_config(), section).keys()), f"{new} is no key of verl"


def test_new_keys_are_where_verl_s_own_migration_puts_them() -> None:
    from verl.experimental.reward_loop import migrate_legacy_reward_impl

    keys = [key for key in old_keys() if new_key(key) is not None]
    config = compose_config()
    with open_dict(config):
        for number, key in enumerate(keys, 1):
            OmegaConf.update(config, key, number)
    migrated = migrate_legacy_reward_impl(copy.deepcopy(config))
    for number, key in enumerate(keys, 1):
        assert OmegaConf.select(migrated, str(new_key(key))) == number, key


def test_keys_of_recipes_that_were_added_with_a_plus_are_seen_too() -> None:
    problems = list(find_problems(changed("reward_model.reward_kwargs.overlong_buffer_cfg.len", 4096)))
    assert len(problems) == 1
    assert "reward.reward_kwargs.overlong_buffer_cfg.len=4096" in problems[0]


def test_section_that_only_a_yaml_file_can_bring_back_is_seen() -> None:
    (problem,) = find_problems(changed("reward_manager.name", "dapo"))
    assert "set reward.reward_manager.name=dapo instead" in problem
