# SPDX-License-Identifier: Apache-2.0
"""``data.sampler``: the options of no-positive-resampling and their start-up check.

They stand beside the name they belong to and not under ``algorithm.scalerl``, which the estimator ``scalerl`` reads and
which is refused with any other one: the sampler works with every estimator and loss.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from scalerl_verl import names
from scalerl_verl.advantage.group_size_checks import asks_for_sizes
from scalerl_verl.curriculum import ResamplingRules
from scalerl_verl.names import (
    ADV_ESTIMATOR,
    ESTIMATOR,
    GROUP_SIZE,
    SAMPLER_CLASS,
    SAMPLER_CLASS_PATH,
    SAMPLER_SECTION,
    V1,
    select,
)
from scalerl_verl.names.asking import only_validates, trainer_mode, uses_estimator
from scalerl_verl.names.keys import read_section
from scalerl_verl.names.numbers import number
from scalerl_verl.names.rules import refusals, then, under

_COMPLETED = ("min_prompts", "min_responses")
"""Keys whose default depends on the rest of the config: null is filled in by `complete`."""


def asks_for_curriculum(config: DictConfig) -> bool:
    """Whether a composed config names our sampler."""
    return bool(select(config, SAMPLER_CLASS_PATH) == SAMPLER_CLASS)


def read_rules(section: Mapping[str, Any]) -> ResamplingRules:
    """The rules of a ``data.sampler`` section.

    Raises:
        ScaleRLConfigError: an unknown key or value.
    """
    given = {key: value for key, value in section.items() if value is not None or key not in _COMPLETED}
    return read_section(ResamplingRules, SAMPLER_SECTION, given)


def _section(config: DictConfig) -> list[str]:
    section = OmegaConf.select(config, SAMPLER_SECTION)
    if isinstance(section, DictConfig) and section.get("class_path") is not None:
        return refusals(read_rules, section) if asks_for_curriculum(config) else []
    return [
        f"{SAMPLER_SECTION}={section} names no sampler: set +{SAMPLER_CLASS_PATH}={SAMPLER_CLASS}, or delete it "
        f"(~{SAMPLER_SECTION})"
    ]


def _floors(config: DictConfig) -> Iterator[str]:
    section = config.data.sampler
    batch, floor = _loader_batch(config), section.get("min_prompts")
    if floor is not None and floor < batch:
        yield (
            f"{SAMPLER_SECTION}.min_prompts={floor} is less than the {batch} prompts that the trainer fetches at once: "
            f"once no more are left, it could not fill a batch; set min_prompts to {batch} or more"
        )
    group, needed = select(config, GROUP_SIZE, 1), section.get("min_responses")
    is_beyond = needed is not None and isinstance(group, int) and needed > group
    # A prompt with a number of responses of its own is judged by all of them if it has fewer.
    if is_beyond and select(section, "history") != names.CUMULATIVE and not asks_for_sizes(config):
        yield (
            f"{SAMPLER_SECTION}.min_responses={needed} is more than the {GROUP_SIZE}={group} responses of a visit, so "
            f"no prompt would ever be dropped: set it to {group} or less, or {SAMPLER_SECTION}.history=cumulative"
        )


def _filtered_groups(config: DictConfig) -> Iterator[str]:
    if select(config, names.FILTER_GROUPS, False) and trainer_mode(config) != names.PIPELINE_RL:
        instead = f"without refill, {ADV_ESTIMATOR}={ESTIMATOR} drops such prompts"
        if uses_estimator(config):
            instead = "zero_variance=drop does it without refill"
        yield (
            f"{names.FILTER_GROUPS}=True discards prompts with equal rewards before they reach the training step, so "
            f"{SAMPLER_SECTION} would never learn of one that always passes: set filter_groups.enable=False "
            f"({instead}), or delete the section (~{SAMPLER_SECTION})"
        )


RULES = (
    under(
        lambda config: OmegaConf.select(config, SAMPLER_SECTION) is not None,
        then(_section, under(asks_for_curriculum, _floors, _filtered_groups)),
    ),
)


def _loader_batch(config: DictConfig) -> int:
    """Prompts a fetch of verl's loader takes at least: it drops what does not fill one."""
    if trainer_mode(config) not in ("sync", names.PPO_OFF_POLICY):
        return 1
    if select(config, f"{V1}.sampler.sync_refill_failed_groups", False):
        return 1
    return int(number(config, "data.gen_batch_size") or number(config, "data.train_batch_size"))


def complete(config: DictConfig) -> None:
    """Fill in what defaults to other parts of the config.

    The floor of prompts is one batch, that of responses half a group, and the file lies in the run's folder.
    """
    if not asks_for_curriculum(config):
        return
    folder = str(select(config, "trainer.default_local_dir", "."))
    batch = max(_loader_batch(config), number(config, "data.train_batch_size"))
    half_a_group = -(-number(config, GROUP_SIZE) // 2)
    defaults = {
        "min_prompts": batch,
        "min_responses": half_a_group,
        "log_file": None if only_validates(config) else os.path.join(folder, names.SAMPLER_LOG_NAME),
    }
    with open_dict(config):
        for key, value in defaults.items():
            if select(config, f"{SAMPLER_SECTION}.{key}") is None:
                OmegaConf.update(config, f"{SAMPLER_SECTION}.{key}", value, force_add=True)
