# SPDX-License-Identifier: Apache-2.0
"""Our config sections as frozen dataclasses; unknown keys and values are errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from scalerl_verl.errors import ScaleRLConfigError

ADV_NORMS = ("batch", "prompt", "none")
ZERO_VARIANCE = ("drop", "keep")
DEFAULT_EPS_MAX = 5.0


@dataclass(frozen=True)
class AlgorithmSettings:
    """``algorithm.scalerl``: read by the estimator ``scalerl``.

    Args:
        adv_norm: divide the group-centred advantages by the standard deviation over the batch (ScaleRL), over
            the prompt's group (GRPO), or not at all (Dr. GRPO).
        zero_variance: ``drop`` takes prompts whose rewards are all equal out of the loss and out of every
            denominator; ``keep`` leaves them in the denominators.
    """

    adv_norm: str = "batch"
    zero_variance: str = "drop"

    def __post_init__(self) -> None:
        problems = []
        if self.adv_norm not in ADV_NORMS:
            problems.append(f"algorithm.scalerl.adv_norm={self.adv_norm!r}: use one of {', '.join(ADV_NORMS)}")
        if self.zero_variance not in ZERO_VARIANCE:
            problems.append(
                f"algorithm.scalerl.zero_variance={self.zero_variance!r}: use one of {', '.join(ZERO_VARIANCE)}"
            )
        if problems:
            raise ScaleRLConfigError(problems)

    @classmethod
    def from_config(cls, section: Mapping[str, Any] | None) -> AlgorithmSettings:
        """Build from the config section ``algorithm.scalerl`` (or its absence).

        Raises:
            ScaleRLConfigError: an unknown key or value.
        """
        given = dict(section or {})
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ScaleRLConfigError(
                [f"algorithm.scalerl.{key} does not exist: the keys are {', '.join(known)}" for key in unknown]
            )
        return cls(**given)


def check_eps_max(value: Any) -> float:
    """The absolute cap of the importance ratio, as a float.

    Raises:
        ValueError: not a finite number above 0.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(
            f"actor_rollout_ref.actor.policy_loss.eps_max={value!r} must be a finite number above 0: it is the "
            "absolute cap of the importance ratio (5 means 5, not 1 + 5)"
        )
    return float(value)
