# SPDX-License-Identifier: Apache-2.0
"""``algorithm.scalerl`` as a frozen dataclass; unknown keys and values are errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scalerl_verl.advantage.passing import make_pass_rule
from scalerl_verl.advantage.shaping_step import make_reward_shapings
from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.interruption.settings import read_alarm, read_settings
from scalerl_verl.names import ALGORITHM_SECTION, read_section

ADV_NORMS = ("batch", "prompt", "none")
ZERO_VARIANCE = ("drop", "keep")


@dataclass(frozen=True)
class AlgorithmSettings:
    """``algorithm.scalerl``: the first two keys are read by the estimator ``scalerl``, the others work with any.

    Args:
        adv_norm: divide the group-centred advantages by the standard deviation over the batch (ScaleRL), over
            the prompt's group (GRPO), or not at all (Dr. GRPO).
        zero_variance: ``drop`` takes prompts whose rewards are all equal out of the loss and out of every
            denominator; ``keep`` leaves them in the denominators.
        reward_shaping: name of a registered reward shaping -> its options; applied in this order before the estimator.
        interruption: see `InterruptionSettings`; read by the agent loop ``forced_interruption``.
        truncation_alarm: see `AlarmSettings`; works with every agent loop.
        pass_key: what decides whether a response passed, see `PassRule`: a key of what the reward function returns, or
            ``reward``. None: ``acc``, in a row without it ``score``, without both the reward.
        pass_threshold: a value above it passes. None: 0.5.
    """

    adv_norm: str = "batch"
    zero_variance: str = "drop"
    reward_shaping: Mapping[str, Any] | None = None
    interruption: Mapping[str, Any] | None = None
    truncation_alarm: Mapping[str, Any] | None = None
    pass_key: str | None = None
    pass_threshold: float | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.adv_norm not in ADV_NORMS:
            problems.append(f"algorithm.scalerl.adv_norm={self.adv_norm!r}: use one of {', '.join(ADV_NORMS)}")
        if self.zero_variance not in ZERO_VARIANCE:
            problems.append(
                f"algorithm.scalerl.zero_variance={self.zero_variance!r}: use one of {', '.join(ZERO_VARIANCE)}"
            )
        try:
            make_reward_shapings(self.reward_shaping)
        except ValueError as error:
            problems += [f"algorithm.scalerl.{line}" for line in str(error).splitlines()]
        try:
            make_pass_rule({"pass_key": self.pass_key, "pass_threshold": self.pass_threshold})
        except ValueError as error:
            problems += [f"algorithm.scalerl.{line}" for line in str(error).splitlines()]
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
