# SPDX-License-Identifier: Apache-2.0
"""Bypass mode replaces the configured loss -> CISPO silently becomes PPO-clip -> an error, and only for our losses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo import rollout_corr_helper

from scalerl_verl.errors import ScaleRLConfigError


def _stub_batch() -> SimpleNamespace:
    """Stands for verl's DataProto: the one field that bypass mode copies."""
    return SimpleNamespace(batch={"rollout_log_probs": 1})


@pytest.mark.fault("bypass mode replaces the configured loss")
def test_bypass_mode_that_would_replace_our_loss_is_refused() -> None:
    config = OmegaConf.create({"loss_mode": "scalerl_cispo"})
    with pytest.raises(ScaleRLConfigError, match=r"loss_mode=scalerl_cispo.*verl\.trainer\.main_ppo"):
        rollout_corr_helper.apply_bypass_mode(_stub_batch(), None, config)
    assert config.loss_mode == "scalerl_cispo"


def test_bypass_mode_of_other_losses_is_left_alone() -> None:
    config, batch = OmegaConf.create({"loss_mode": "vanilla"}), _stub_batch()
    rollout_corr_helper.apply_bypass_mode(batch, OmegaConf.create({"loss_type": "ppo_clip"}), config)
    assert config.loss_mode == "bypass_mode" and batch.batch["old_log_probs"] == 1
