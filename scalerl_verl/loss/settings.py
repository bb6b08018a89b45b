# SPDX-License-Identifier: Apache-2.0
"""Our keys of verl's policy-loss section as a frozen dataclass; values that mean nothing are errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from scalerl_verl.names import LOSS_SECTION
from scalerl_verl.names.keys import defaults, require_allowed

_DEFAULT = defaults(LOSS_SECTION)


@dataclass(frozen=True)
class PolicyLossSettings:
    """Our keys of ``actor_rollout_ref.actor.policy_loss``: read by the losses that list them among their options.

    Args:
        eps_max: absolute cap of the importance ratio (5 means 5, not 1 + 5), 1 or more.
        token_mask_range: ``[low, high]``; a token whose ratio lies outside contributes nothing and is counted (IcePop).
        sequence_truncation: ``product`` (sequence-level truncated importance sampling, Seq-TIS) or ``geometric_mean``
            (the length-normalised ratio of GSPO): the capped ratio is that of the whole response.
    """

    eps_max: float = _DEFAULT["eps_max"]
    token_mask_range: Sequence[float] | None = _DEFAULT["token_mask_range"]
    sequence_truncation: str | None = _DEFAULT["sequence_truncation"]

    def __post_init__(self) -> None:
        require_allowed(self, LOSS_SECTION)

    @classmethod
    def from_config(cls, section: Any) -> PolicyLossSettings:
        """Build from verl's policy-loss section (a mapping or dataclass with ``get``), whose other keys are verl's.

        Raises:
            ScaleRLConfigError: a value that means nothing.
        """
        return cls(**{field.name: section.get(field.name, field.default) for field in fields(cls)})
