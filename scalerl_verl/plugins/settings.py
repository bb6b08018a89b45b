# SPDX-License-Identifier: Apache-2.0
"""Our config sections as frozen dataclasses; unknown keys and values are errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.losses.ratios import SEQUENCE_TRUNCATIONS, is_token_range
from scalerl_verl.names import ALGORITHM_SECTION, DEFAULT_EPS_MAX, LOSS_SECTION, read_section
from scalerl_verl.plugins.interruption_settings import read_alarm, read_settings
from scalerl_verl.plugins.passing import make_pass_rule
from scalerl_verl.plugins.reward_shaping import make_reward_shapings

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


@dataclass(frozen=True)
class PolicyLossSettings:
    """Our keys of ``actor_rollout_ref.actor.policy_loss``: read by the loss ``scalerl_cispo``.

    Args:
        eps_max: absolute cap of the importance ratio (5 means 5, not 1 + 5), 1 or more.
        token_mask_range: ``[low, high]``; a token whose ratio lies outside contributes nothing and is counted (IcePop).
        sequence_truncation: ``product`` (sequence-level truncated importance sampling, Seq-TIS) or ``geometric_mean``
            (the length-normalised ratio of GSPO): the capped ratio is that of the whole response.
    """

    eps_max: float = DEFAULT_EPS_MAX
    token_mask_range: Sequence[float] | None = None
    sequence_truncation: str | None = None

    def __post_init__(self) -> None:
        problems = []
        path, cap = LOSS_SECTION, self.eps_max
        if isinstance(cap, bool) or not isinstance(cap, int | float) or not math.isfinite(cap) or cap < 1:
            problems.append(
                f"{path}.eps_max={cap!r} must be a finite number, 1 or more: it is the absolute cap of the importance "
                "ratio (5 means 5, not 1 + 5), and below 1 it would cap the ratio of every token that both policies "
                "agree on; set it to 5.0"
            )
        if self.token_mask_range is not None and not is_token_range(self.token_mask_range):
            problems.append(
                f"{path}.token_mask_range={self.token_mask_range!r} must be [low, high] with 0 <= low < 1 < high, such "
                "as [0.5,5.0], or null: tokens whose importance ratio lies outside are masked"
            )
        if self.sequence_truncation is not None and self.sequence_truncation not in SEQUENCE_TRUNCATIONS:
            problems.append(
                f"{path}.sequence_truncation={self.sequence_truncation!r}: use one of "
                f"{', '.join(SEQUENCE_TRUNCATIONS)}, or null for a ratio per token"
            )
        if problems:
            raise ScaleRLConfigError(problems)

    @classmethod
    def from_config(cls, section: Any) -> PolicyLossSettings:
        """Build from verl's policy-loss section (a mapping or dataclass with ``get``), whose other keys are verl's.

        Raises:
            ScaleRLConfigError: a value that means nothing.
        """
        return cls(**{field.name: section.get(field.name, field.default) for field in fields(cls)})
