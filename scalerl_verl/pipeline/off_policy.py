# SPDX-License-Identifier: Apache-2.0
"""``trainer.v1.trainer_mode=ppo_off_policy``: generate a batch, then k optimizer steps on a k-th of its prompts each.

The baseline that PipelineRL is compared with: verl's synchronous trainer, whose mini-batches are those k steps. The old
log-probs stay those recorded at sampling, so the last step is k - 1 updates off-policy.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from scalerl_verl.names import PPO_OFF_POLICY, TRAINER_MODE
from scalerl_verl.pipeline.settings import off_policy_settings
from scalerl_verl.upstream.registry import require_checked_run


class PPOTrainerOffPolicy(PPOTrainerSync):
    """PPO-off-policy-k."""

    def __init__(self, config: DictConfig) -> None:
        require_checked_run(f"{TRAINER_MODE}={PPO_OFF_POLICY}")
        self._num_updates = off_policy_settings(config).num_updates
        super().__init__(config)

    def _build_replay_buffer(self) -> Any:
        # verl's base class asks for "sync" by name wherever generation and training take turns, as they do here.
        self.trainer_mode = "sync"
        return super()._build_replay_buffer()

    def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> Any:
        metrics["scalerl/pipeline/updates_per_batch"] = self._num_updates
        return super()._step_once(metrics, timing_raw, sample_batch_size)
