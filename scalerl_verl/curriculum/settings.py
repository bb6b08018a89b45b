# SPDX-License-Identifier: Apache-2.0
"""``data.sampler``: the options of no-positive-resampling and their start-up check.

They stand beside the name they belong to and not under ``algorithm.scalerl``, which the estimator ``scalerl`` reads and
which is refused with any other one: the sampler works with every estimator and loss.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from scalerl_verl.advantage.group_size_checks import asks_for_sizes
from scalerl_verl.curriculum import ResamplingRules
from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.names import (
    ADV_ESTIMATOR,
    CUMULATIVE,
    ESTIMATOR,
    FILTER_GROUPS,
    GROUP_SIZE,
    PLUGIN,
    PPO_OFF_POLICY,
    SAMPLER_CLASS,
    SAMPLER_LOG_NAME,
    SAMPLER_SECTION,
    TRAINER_MODE,
    V1,
    select,
)
from scalerl_verl.names.asking import only_validates, uses_estimator
from scalerl_verl.names.numbers import number

SECTION = SAMPLER_SECTION
CLASS_PATH = SAMPLER_CLASS
_RULES = tuple(field.name for field in fields(ResamplingRules))
_KEYS = ("class_path", *_RULES, "log_file")
_COMPLETED = ("min_prompts", "min_responses")


def asks_for_curriculum(config: DictConfig) -> bool:
    """Whether a composed config names our sampler."""
    return bool(select(config, f"{SECTION}.class_path") == CLASS_PATH)


def read_rules(section: Mapping[str, Any]) -> ResamplingRules:
    """The rules of a ``data.sampler`` section.

    Raises:
        ScaleRLConfigError: an unknown key or value.
    """
    problems = [
        f"{SECTION}.{key} does not exist: the keys are {', '.join(_KEYS)}" for key in sorted(set(section) - set(_KEYS))
    ]
    log_file = section.get("log_file")
    if log_file is not None and not isinstance(log_file, str):
        problems.append(f"{SECTION}.log_file={log_file!r}: give the path of a file, or leave it out")
    # Some defaults depend on the rest of the config: null is filled in by `complete`.
    given = {key: section[key] for key in _RULES if key in section}
    given = {key: value for key, value in given.items() if value is not None or key not in _COMPLETED}
    try:
        rules = ResamplingRules(**given)
    except ValueError as error:
        problems += [f"{SECTION}.{line}" for line in str(error).splitlines()]
    if problems:
        raise ScaleRLConfigError(problems)
    return rules


def find_problems(config: DictConfig) -> Iterator[str]:
    """Contradictions of ``data.sampler`` with itself and the rest of the config."""
    section = OmegaConf.select(config, SECTION)
    if section is None:
        return
    if not isinstance(section, DictConfig) or section.get("class_path") is None:
        yield f"{SECTION}={section} names no sampler: set +{SECTION}.class_path={CLASS_PATH}, or delete it (~{SECTION})"
        return
    path = str(section.class_path)
    if path != CLASS_PATH:
        if path.startswith(PLUGIN):
            yield f"{SECTION}.class_path={path} does not exist: our sampler is {CLASS_PATH}"
        return
    try:
        read_rules(OmegaConf.to_container(section, resolve=True))
    except ScaleRLConfigError as error:
        yield from error.problems
        return
    batch, floor = _loader_batch(config), section.get("min_prompts")
    if floor is not None and floor < batch:
        yield (
            f"{SECTION}.min_prompts={floor} is less than the {batch} prompts that the trainer fetches at once: once "
            f"no more are left, it could not fill a batch; set min_prompts to {batch} or more"
        )
    group, needed = select(config, GROUP_SIZE, 1), section.get("min_responses")
    is_beyond = needed is not None and isinstance(group, int) and needed > group
    # A prompt with a number of responses of its own is judged by all of them if it has fewer.
    if is_beyond and select(section, "history") != CUMULATIVE and not asks_for_sizes(config):
        yield (
            f"{SECTION}.min_responses={needed} is more than the {GROUP_SIZE}={group} responses of a "
            f"visit, so no prompt would ever be dropped: set it to {group} or less, or {SECTION}.history=cumulative"
        )
    if select(config, FILTER_GROUPS, False):
        dropping = (
            "zero_variance=drop does it without refill"
            if uses_estimator(config)
            else f"without refill, {ADV_ESTIMATOR}={ESTIMATOR} drops such prompts"
        )
        yield (
            f"{FILTER_GROUPS}=True discards prompts with equal rewards before they reach the training "
            f"step, so {SECTION} would never learn of one that always passes: set filter_groups.enable=False "
            f"({dropping}), or delete the section (~{SAMPLER_SECTION})"
        )


def _loader_batch(config: DictConfig) -> int:
    """Prompts a fetch of verl's loader takes at least: it drops what does not fill one."""
    if select(config, TRAINER_MODE, "sync") not in ("sync", PPO_OFF_POLICY):
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
        "log_file": None if only_validates(config) else os.path.join(folder, SAMPLER_LOG_NAME),
    }
    with open_dict(config):
        for key, value in defaults.items():
            if select(config, f"{SECTION}.{key}") is None:
                OmegaConf.update(config, f"{SECTION}.{key}", value, force_add=True)
