# SPDX-License-Identifier: Apache-2.0
"""Each baseline preset, run through verl's own estimator and loss, against its paper's objective written as loops.

Prompt a has three responses of 2, 1 and 4 tokens, prompt b two of 3 and 2. The objective is -J of

    grpo           arXiv 2402.03300, without its KL term
    drgrpo         arXiv 2503.20783, divided by a constant instead of |o_i|
    dapo           arXiv 2503.14476
    gspo           arXiv 2507.18071
    cispo_minimax  arXiv 2506.13585
    reinforce_tis  Yao et al. 2025, truncated importance sampling (TIS)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import verl  # noqa: F401 - loads the plugin, which puts our presets on Hydra's search path
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

from scalerl_verl.advantage.step import advantage_step, fold_row_weights

BUDGET = 64
UIDS = list("aaabb")
LENGTHS = [2, 1, 4, 3, 2]
REWARDS = [1.0, -1.0, 1.0, -1.0, 1.0]
GROUPS = {"a": [0, 1, 2], "b": [3, 4]}
WIDTH = 5
BASELINES = ("grpo", "drgrpo", "dapo", "gspo", "cispo_minimax", "reinforce_tis")


def log_probs() -> tuple[list[list[float]], list[list[float]]]:
    """log pi_train and log pi_gen per token; their ratios lie below, in and above every clip range used here."""
    ratios = [[0.7, 6.0], [1.5], [1.0, 1.23, 0.95, 2.5], [0.9, 1.1, 1.001], [1.3, 0.75]]
    train = [[-1.0 - 0.1 * t - 0.05 * i for t in range(n)] for i, n in enumerate(LENGTHS)]
    gen = [[x - math.log(r) for x, r in zip(*row, strict=True)] for row in zip(train, ratios, strict=True)]
    return train, gen


def advantages(divide: bool) -> list[float]:
    result = [0.0] * 5
    for rows in GROUPS.values():
        mine = [REWARDS[i] for i in rows]
        for i in rows:
            # verl's standard deviation is the unbiased one; the papers do not say.
            result[i] = (REWARDS[i] - np.mean(mine)) / (np.std(mine, ddof=1) + 1e-6 if divide else 1.0)
    return result


def ppo_slope(ratio: float, advantage: float, low: float, high: float) -> float:
    """d/dlogp of min(r A, clip(r) A)."""
    clipped = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
    return 0.0 if clipped else ratio * advantage


Slope = Callable[[int, int, float], float]


def per_token(slope: Slope, share: Callable[[int], float]) -> list[list[float]]:
    """-dJ/dlogp_it = -slope(i, t, rho_it) * share(i)."""
    train, gen = log_probs()
    return [
        [-slope(i, t, math.exp(train[i][t] - gen[i][t])) * share(i) for t in range(n)] for i, n in enumerate(LENGTHS)
    ]


def sample_share(i: int) -> float:
    return 1 / (5 * LENGTHS[i])


def prompt_share(i: int) -> float:
    return 1 / (2 * sum(LENGTHS[k] for k in GROUPS[UIDS[i]]))


def reference(name: str) -> list[list[float]]:
    normed, centred = advantages(True), advantages(False)
    if name == "grpo":
        return per_token(lambda i, t, rho: ppo_slope(rho, normed[i], 0.2, 0.2), sample_share)
    if name == "drgrpo":
        return per_token(lambda i, t, rho: ppo_slope(rho, centred[i], 0.2, 0.2), lambda i: 1 / (5 * BUDGET))
    if name == "dapo":
        return per_token(lambda i, t, rho: ppo_slope(rho, normed[i], 0.2, 0.26), prompt_share)
    if name == "cispo_minimax":
        return per_token(lambda i, t, rho: min(rho, 5.0) * normed[i], prompt_share)
    if name == "reinforce_tis":
        return per_token(lambda i, t, rho: min(rho, 2.0) * centred[i], lambda i: 1 / sum(LENGTHS))
    train, gen = log_probs()
    s = [math.exp(sum(x - y for x, y in zip(*row, strict=True)) / len(row[0])) for row in zip(train, gen, strict=True)]
    return per_token(lambda i, t, rho: ppo_slope(s[i], normed[i], 3e-3, 4e-3), sample_share)


def padded(rows: list[list[float]], fill: float = 0.0) -> torch.Tensor:
    return torch.tensor([row + [fill] * (WIDTH - len(row)) for row in rows], dtype=torch.float64)


def compose_preset(name: str) -> DictConfig:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[f"+scalerl={name}", f"data.max_response_length={BUDGET}"])


def actor_config(config: DictConfig) -> Any:
    actor = config.actor_rollout_ref.actor
    keys = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_scale_factor")
    built = FSDPActorConfig(
        rollout_n=config.actor_rollout_ref.rollout.n,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=actor.policy_loss.loss_mode),
        **{key: actor[key] for key in keys},
    )
    built.global_batch_info.update(
        dp_size=1, batch_num_tokens=sum(LENGTHS), global_batch_size=5, loss_scale_factor=actor.loss_scale_factor
    )
    return built


def gradient(name: str) -> torch.Tensor:
    """dloss/dlog pi_train by verl's V1 path: correction, estimator, (our row weights,) loss."""
    config = compose_preset(name)
    train, gen = log_probs()
    mask_BT = torch.arange(WIDTH)[None, :] < torch.tensor(LENGTHS)[:, None]
    rewards_BT = torch.zeros(5, WIDTH, dtype=torch.float64)
    rewards_BT[torch.arange(5), torch.tensor(LENGTHS) - 1] = torch.tensor(REWARDS, dtype=torch.float64)
    bypass = config.algorithm.rollout_correction.bypass_mode
    tensors = {
        "response_mask": mask_BT.long(),
        "token_level_rewards": rewards_BT,
        "rollout_log_probs": padded(gen),
        "old_log_probs": padded(gen if bypass else train),
    }
    data = DataProto(batch=TensorDict(tensors, batch_size=5), non_tensor_batch={"uid": np.array(UIDS, dtype=object)})
    with advantage_step(config, {}):
        if not bypass:
            data, _ = compute_rollout_correction_and_add_to_batch(data, config.algorithm.rollout_correction)
        data = compute_advantage_for_multi_trajectories(
            data,
            batch_keys=[f"{uid}_{row}_0" for row, uid in enumerate(UIDS)],
            adv_estimator=config.algorithm.adv_estimator,
            norm_adv_by_std_in_grpo=config.algorithm.norm_adv_by_std_in_grpo,
            config=config.algorithm,
        )
        data = fold_row_weights(data)
    logp_BT = padded(train).requires_grad_()
    mode = config.actor_rollout_ref.actor.loss_agg_mode
    loss, _ = POLICY_LOSS_REGISTRY[config.actor_rollout_ref.actor.policy_loss.loss_mode](
        old_log_prob=data.batch["old_log_probs"],
        log_prob=logp_BT,
        advantages=data.batch["advantages"],
        response_mask=mask_BT,
        # What the patched agg_loss of a worker makes of our mode.
        loss_agg_mode="seq-mean-token-sum" if mode == "prompt-mean" else mode,
        config=actor_config(config),
        rollout_is_weights=data.batch.get("rollout_is_weights", None),
    )
    loss.backward()
    assert logp_BT.grad is not None
    return logp_BT.grad


@pytest.mark.parametrize("name", BASELINES)
def test_preset_trains_on_the_objective_of_its_paper(name: str) -> None:
    expected_BT = padded(reference(name))
    assert expected_BT.any()
    torch.testing.assert_close(gradient(name), expected_BT, rtol=1e-9, atol=1e-12)


def test_ratios_of_the_batch_tell_the_baselines_apart() -> None:
    """Guards the test above: with every ratio inside every clip range it would prove less than it says."""
    references = {name: padded(reference(name)) for name in BASELINES}
    for name, mine in references.items():
        assert all(not torch.allclose(mine, other) for key, other in references.items() if key != name)
    clipped = (padded(reference("grpo")) == 0) & (padded(reference("cispo_minimax")) != 0)
    assert clipped.any(), "PPO's clip drops tokens that CISPO keeps"
    train, gen = log_probs()
    ratios = [math.exp(x - y) for row in zip(train, gen, strict=True) for x, y in zip(*row, strict=True)]
    assert min(ratios) < 0.8 and max(ratios) > 5.0 and any(1.2 < ratio < 1.26 for ratio in ratios)


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_share_batch_and_optimizer_with_the_recipe(name: str) -> None:
    recipe, mine = copy.deepcopy(compose_preset("recipe")), compose_preset(name)
    for path in ("ppo_mini_batch_size", "ppo_epochs", "entropy_coeff", "use_kl_loss", "optim"):
        assert mine.actor_rollout_ref.actor[path] == recipe.actor_rollout_ref.actor[path]
    assert mine.data.train_batch_size == recipe.data.train_batch_size == 48
    for path in ("n", "temperature", "top_p", "top_k"):
        assert mine.actor_rollout_ref.rollout[path] == recipe.actor_rollout_ref.rollout[path]
