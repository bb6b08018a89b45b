# SPDX-License-Identifier: Apache-2.0
"""What a preset means for a miniature run: its advantages, weights and loss are the functions that verl would call.

Shape legend: B rows (responses), T positions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, open_dict
from torch import Tensor

from scalerl_verl.advantage import row_weights, scalerl_advantages
from scalerl_verl.curriculum.rules import ResamplingRules
from scalerl_verl.loss import aggregate_loss, cispo_token_loss
from scalerl_verl.planning.resolve import compose_run

OFF_POLICY = "ppo_off_policy"


@dataclass(frozen=True)
class Recipe:
    """A composed config, and the parts of it that a miniature run uses.

    Args:
        name: what it is called in results.
        config: verl's, composed with presets and overrides.
        actor: verl's ActorConfig of it.
        interrupts: whether responses are interrupted.
        rules: of no-positive-resampling, None without it.
        refills: whether prompts with equal rewards are replaced (DAPO's dynamic sampling).
        num_updates: optimizer steps a batch.
    """

    name: str
    config: DictConfig
    actor: Any
    interrupts: bool
    rules: ResamplingRules | None
    refills: bool
    num_updates: int

    @property
    def num_prompts(self) -> int:
        """Prompts a batch."""
        return int(self.config.data.train_batch_size)

    @property
    def group(self) -> int:
        """Responses a prompt."""
        return int(self.config.actor_rollout_ref.rollout.n)

    def advantages(self, rewards_B: NDArray[np.float64], mask_BT: Tensor) -> tuple[Tensor, NDArray[np.bool_]]:
        """Advantages with the weights of rows as the trainer gets them, [B, T], and the rows that count, [B].

        Rows of one prompt stand beside each other.
        """
        groups = np.repeat(np.arange(len(rewards_B) // self.group), self.group)
        tokens_B = mask_BT.sum(1).cpu().numpy()
        trains_B = tokens_B > 0
        algorithm, mode = self.config.algorithm, self.config.actor_rollout_ref.actor.loss_agg_mode
        if algorithm.adv_estimator == "scalerl":
            ours = algorithm.scalerl
            found = scalerl_advantages(
                rewards_B, groups, trains_B, adv_norm=ours.adv_norm, zero_variance=ours.zero_variance
            )
            kept_B = found.kept_B
            weights_B = row_weights(mode, tokens_B, groups, kept_B, num_rows=len(groups), trains_B=trains_B)
            row_B = torch.as_tensor(found.advantages_B * weights_B, dtype=torch.float32, device=mask_BT.device)
            return row_B[:, None] * mask_BT, kept_B
        from verl.trainer.ppo import core_algos

        if algorithm.adv_estimator != "grpo":
            raise ValueError(f"adv_estimator={algorithm.adv_estimator} is not known here: use scalerl or grpo")
        rewards_BT = torch.zeros(mask_BT.shape, device=mask_BT.device)
        rewards_BT[:, -1] = torch.as_tensor(rewards_B, dtype=torch.float32, device=mask_BT.device)
        # verl's faster form of the same estimator
        by_std = bool(algorithm.norm_adv_by_std_in_grpo)
        advantages_BT, _ = core_algos.compute_grpo_vectorized_outcome_advantage(
            rewards_BT, mask_BT.float(), groups, norm_adv_by_std_in_grpo=by_std
        )
        if mode == "prompt-mean":
            weights_B = row_weights(mode, tokens_B, groups, trains_B, num_rows=len(groups), trains_B=trains_B)
            weights = torch.as_tensor(weights_B, dtype=torch.float32, device=mask_BT.device)
            advantages_BT = advantages_BT * weights[:, None]
        return advantages_BT, trains_B

    def loss(
        self, old_BT: Tensor, logp_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, counts: dict[str, int]
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss of one run's rows of a micro-batch; ``counts`` are those of the mini-batch."""
        mode, policy = (
            self.config.actor_rollout_ref.actor.loss_agg_mode,
            self.config.actor_rollout_ref.actor.policy_loss,
        )
        if policy.loss_mode == "scalerl_cispo":
            loss_BT = cispo_token_loss(logp_BT, old_BT, advantages_BT, mask_BT, float(policy.eps_max))
            with torch.no_grad():
                ratio = (logp_BT - old_BT)[mask_BT].exp()
                metrics = {"clipped": (ratio > float(policy.eps_max)).float().mean()}
            return aggregate_loss(loss_BT, mask_BT, mode, **counts), metrics
        from verl.trainer.ppo import core_algos

        self.actor.global_batch_info.update({"dp_size": 1, "loss_scale_factor": None, **counts})
        function = core_algos.get_policy_loss_fn(policy.loss_mode)
        # verl's losses reduce by themselves; the prompt average of weighted rows is this one of verl's modes
        verl_mode = "seq-mean-token-sum" if mode == "prompt-mean" else mode
        loss, measured = function(
            old_log_prob=old_BT,
            log_prob=logp_BT,
            advantages=advantages_BT,
            response_mask=mask_BT.float(),
            loss_agg_mode=verl_mode,
            config=self.actor,
        )
        return loss, {"clipped": measured["actor/pg_clipfrac"]}


def make_recipe(name: str, presets: Sequence[str], overrides: Sequence[str], num_updates: int) -> Recipe:
    """Compose ``presets`` with the sizes of `tiny`, and ``num_updates`` optimizer steps on a batch.

    A batch has num_updates x 32 prompts, as `ppo_off_policy` does; with 1 it is on-policy.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    line = [f"+scalerl=[{','.join([*presets, 'tiny'])}]", *overrides]
    config = compose_run(line)
    size = int(config.data.train_batch_size)
    with open_dict(config):
        config.data.train_batch_size = size * num_updates
    sampler = config.data.get("sampler") or {}
    rules = None
    if str(sampler.get("class_path", "")).endswith("NoPositiveResampling"):
        rules = ResamplingRules(sampler.threshold, sampler.history, sampler.first_epoch, size * num_updates)
    loop = config.actor_rollout_ref.rollout.agent.default_agent_loop
    filters = config.algorithm.get("filter_groups") or {}
    return Recipe(
        name,
        config,
        _actor_config(config),
        loop == "forced_interruption",
        rules,
        bool(filters.get("enable", False)),
        num_updates,
    )


def _actor_config(config: DictConfig) -> Any:
    """verl's ActorConfig with what its losses read."""
    from verl.workers.config import ActorConfig

    actor = config.actor_rollout_ref.actor
    clips = {name: actor[name] for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}
    return ActorConfig(
        strategy="fsdp2", rollout_n=config.actor_rollout_ref.rollout.n, ppo_micro_batch_size_per_gpu=1, **clips
    )
