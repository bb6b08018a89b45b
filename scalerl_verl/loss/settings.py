# SPDX-License-Identifier: Apache-2.0
"""Our keys of verl's policy-loss section as a frozen dataclass; values that mean nothing are errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.loss.ratios import SEQUENCE_TRUNCATIONS, is_token_range
from scalerl_verl.names import DEFAULT_EPS_MAX, LOSS_SECTION


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
