# SPDX-License-Identifier: Apache-2.0
"""Whether responses of a verl run passed: the run's definition, and the values of a batch (runs on the driver)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from omegaconf import DictConfig

from scalerl_verl.advantage.passed import PassRule
from scalerl_verl.errors import RewardError
from scalerl_verl.names import PASS_KEY, PASS_THRESHOLD, select

_said: set[str] = set()
_logger = logging.getLogger(__name__)


def read_pass_rule(config: Any) -> PassRule:
    """The definition of a composed config; null stands for a default.

    Raises:
        ValueError: a value that is not allowed.
    """
    if not isinstance(config, DictConfig):
        return PassRule()
    given = {"key": select(config, PASS_KEY), "threshold": select(config, PASS_THRESHOLD)}
    return PassRule(**{field: value for field, value in given.items() if value is not None})


def reward_infos(extra_fields: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What the reward function returned for each row, from what verl's worker kept of it; empty if a number."""
    found = (fields.get("reward_extra_info") for fields in extra_fields)
    return [info if isinstance(info, Mapping) else {} for info in found]


def judge(config: Any, rewards_R: ArrayLike, infos_R: Sequence[Mapping[str, Any]]) -> NDArray[np.bool_]:
    """Whether each response passed, [R] bool; values that are worth a part of the answer are pointed out once.

    Args:
        config: the run's.
        rewards_R: the reward function's rewards, [R].
        infos_R: what it returned for each, see `reward_infos`.

    Raises:
        RewardError: it returned something that neither passes nor fails.
    """
    rule = read_pass_rule(config)
    try:
        values_R = rule.values(rewards_R, infos_R)
    except ValueError as error:
        raise RewardError(str(error)) from error
    parts_R = (values_R > 0) & (values_R < 1)
    if parts_R.any() and select(config, PASS_THRESHOLD) is None:
        _say_once(
            f"responses are graded between 0 and 1 ({values_R[parts_R][0]:g}), and {rule.describe()}: if another grade "
            f"is right, set {PASS_THRESHOLD} (setting it to {rule.threshold:g} silences this line)"
        )
    return values_R > rule.threshold


def _say_once(text: str) -> None:
    if text.split("(", 1)[0] not in _said:
        _said.add(text.split("(", 1)[0])
        _logger.warning(text)
