# SPDX-License-Identifier: Apache-2.0
"""verl's policy-loss config with the keys of our losses (the start-up check selects it by ``_target_``)."""

from __future__ import annotations

from dataclasses import dataclass

from verl.workers.config import PolicyLossConfig

from scalerl_verl.loss.settings import PolicyLossSettings
from scalerl_verl.names import DEFAULT_EPS_MAX


@dataclass
class ScaleRLPolicyLossConfig(PolicyLossConfig):
    """Adds the keys of ``scalerl_cispo``; `PolicyLossSettings` says what they mean."""

    eps_max: float = DEFAULT_EPS_MAX
    token_mask_range: list[float] | None = None
    sequence_truncation: str | None = None

    def __post_init__(self) -> None:
        PolicyLossSettings.from_config(self)
