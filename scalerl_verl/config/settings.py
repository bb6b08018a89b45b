# SPDX-License-Identifier: Apache-2.0
"""``algorithm.scalerl`` as a frozen dataclass; unknown keys and values are errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scalerl_verl.advantage.shaping_step import make_reward_shapings
from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.interruption.settings import read_alarm, read_settings
from scalerl_verl.names import ALGORITHM_SECTION
from scalerl_verl.names.keys import defaults, read_section, wrong_fields

_DEFAULT = defaults(ALGORITHM_SECTION)


@dataclass(frozen=True)
class AlgorithmSettings:
    """``algorithm.scalerl``: the first two keys are read by the estimator ``scalerl``, the others work with any.

    Args:
        adv_norm: divide the group-centred advantages by the standard deviation over the batch (ScaleRL), over
            the prompt's group (GRPO), or not at all (Dr. GRPO).
        zero_variance: ``drop`` takes prompts whose rewards are all equal out of the loss and out of every
            denominator; ``keep`` leaves them in the denominators.
        reward_shaping: name of a registered reward shaping -> its options; applied in this order before the estimator.
        interruption: section of the budgets and markers below; read by the agent loop ``forced_interruption``.
        truncation_alarm: section of the three keys below; works with every agent loop.
        pass_key: what decides whether a response passed: a key of what the reward function returns, or ``reward``.
            null: ``acc``, in a row without it ``score``, without both the reward.
        pass_threshold: a response whose value is above this number passes. null: 0.5.
        fast_frontend: one answer a request from vLLM's front end, when it is complete, and text only for stop strings;
            what a response is stays the same.
    """

    adv_norm: str = _DEFAULT["adv_norm"]
    zero_variance: str = _DEFAULT["zero_variance"]
    reward_shaping: Mapping[str, Any] | None = _DEFAULT["reward_shaping"]
    interruption: Mapping[str, Any] | None = _DEFAULT["interruption"]
    truncation_alarm: Mapping[str, Any] | None = _DEFAULT["truncation_alarm"]
    pass_key: str | None = _DEFAULT["pass_key"]
    pass_threshold: float | None = _DEFAULT["pass_threshold"]
    fast_frontend: bool = _DEFAULT["fast_frontend"]

    def __post_init__(self) -> None:
        problems = [f"{ALGORITHM_SECTION}.{problem}" for problem in wrong_fields(self, ALGORITHM_SECTION)]
        try:
            make_reward_shapings(self.reward_shaping)
        except ValueError as error:
            problems += [f"{ALGORITHM_SECTION}.{line}" for line in str(error).splitlines()]
        for read, section in ((read_settings, self.interruption), (read_alarm, self.truncation_alarm)):
            try:
                read(section)
            except ScaleRLConfigError as error:
                problems += error.problems
        if problems:
            raise ScaleRLConfigError(problems)

    @classmethod
    def from_config(cls, section: Mapping[str, Any] | None) -> AlgorithmSettings:
        """Build from the config section ``algorithm.scalerl`` (or its absence).

        Raises:
            ScaleRLConfigError: an unknown key or value.
        """
        return read_section(cls, ALGORITHM_SECTION, section)
