# SPDX-License-Identifier: Apache-2.0
"""verl's policy-loss config with the keys of our losses (the start-up check selects it by ``_target_``)."""

from __future__ import annotations

from dataclasses import dataclass

from verl.workers.config import PolicyLossConfig

from scalerl_verl.plugins.settings import DEFAULT_EPS_MAX, check_eps_max


@dataclass
class ScaleRLPolicyLossConfig(PolicyLossConfig):
    """Adds ``eps_max``, the absolute cap of the importance ratio of ``scalerl_cispo`` (arXiv 2510.13786, Eq. 4)."""

    eps_max: float = DEFAULT_EPS_MAX

    def __post_init__(self) -> None:
        check_eps_max(self.eps_max)
