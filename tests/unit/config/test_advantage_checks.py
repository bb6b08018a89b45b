# SPDX-License-Identifier: Apache-2.0
"""The start-up check of advantages, row weights and reward shapings, and of the losses that can carry them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import verl.workers.config
from hydra.utils import get_class
from omegaconf import open_dict
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config import FSDPActorConfig

from scalerl_verl.advantage import reward_shaping
from scalerl_verl.config.checks import find_problems
from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.upstream.activation import ACTIVE_ENV
from scalerl_verl.verl import startup
from tests.unit.composed import ACTOR, CORRECTION, ROLLOUT, Refusal, changed, check_refusal, compose_config

pytestmark = pytest.mark.usefixtures("clean_environment")

REFUSALS: dict[str, Refusal] = {
    "misspelt length penalty": (
        "recipe",
        {"algorithm.scalerl.reward_shaping": {"length_penalty": {"l_max": 5}}},
        ["algorithm.scalerl.reward_shaping.length_penalty.l_max does not exist", "max_length, cache_length"],
    ),
    "truncated responses left out with an estimator of verl": (
        "grpo",
        {"algorithm.scalerl.reward_shaping": {"exclude_truncated": {}}},
        ["algorithm.scalerl.reward_shaping.exclude_truncated leaves responses out", "adv_estimator=scalerl"],
    ),
    "unknown normalisation": (
        "recipe",
        {"algorithm.scalerl.adv_norm": "grpo"},
        ["algorithm.scalerl.adv_norm='grpo'", "batch, prompt, none"],
    ),
    "unknown treatment of zero variance": (
        "recipe",
        {"algorithm.scalerl.zero_variance": "resample"},
        ["algorithm.scalerl.zero_variance='resample'", "drop, keep"],
    ),
    "section that another estimator does not read": (
        "advantage",
        {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 4},
        ["algorithm.scalerl is read by the estimator scalerl only", "algorithm.adv_estimator=grpo"],
    ),
    "keys that another estimator does not read": (
        "recipe",
        {"algorithm.adv_estimator": "grpo"},
        ["algorithm.scalerl.adv_norm and algorithm.scalerl.zero_variance: read by the estimator scalerl only"],
    ),
    "two filters of groups": (
        "advantage",
        {"algorithm.filter_groups.enable": True, f"{ROLLOUT}.n": 4},
        ["algorithm.scalerl.zero_variance=drop", "algorithm.filter_groups.enable=True"],
    ),
    "group of one": ("recipe", {f"{ROLLOUT}.n": 1}, [f"{ROLLOUT}.n=1", "2 or more"]),
    "KL in the reward": ("recipe", {"algorithm.use_kl_in_reward": True}, ["algorithm.use_kl_in_reward=True"]),
    "prompt average with SAPO": (
        "prompt_mean",
        {f"{ACTOR}.policy_loss.loss_mode": "sapo"},
        [f"{ACTOR}.loss_agg_mode=prompt-mean would be ignored by policy_loss.loss_mode=sapo"],
    ),
    "prompt average with GMPO": (
        "prompt_mean",
        {f"{ACTOR}.policy_loss.loss_mode": "geo_mean"},
        [f"{ACTOR}.loss_agg_mode=prompt-mean would be ignored by policy_loss.loss_mode=geo_mean"],
    ),
    "prompt average with DRO": (
        "prompt_mean",
        {f"{ACTOR}.policy_loss.loss_mode": "dro"},
        [f"{ACTOR}.policy_loss.loss_mode=dro", f"{ACTOR}.loss_agg_mode=prompt-mean"],
    ),
    "our advantages with Clip-Cov": (
        "advantage",
        {f"{ACTOR}.policy_loss.loss_mode": "clip_cov", f"{ROLLOUT}.n": 4},
        [f"{ACTOR}.policy_loss.loss_mode=clip_cov", "algorithm.adv_estimator=scalerl"],
    ),
    "our advantages with GMPO": (
        "advantage",
        {
            f"{ACTOR}.policy_loss.loss_mode": "geo_mean",
            f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
            f"{ROLLOUT}.n": 4,
        },
        [f"{ACTOR}.policy_loss.loss_mode=geo_mean", "algorithm.adv_estimator=scalerl"],
    ),
    "our advantages with SAPO and another mode than its own": (
        "advantage",
        {f"{ACTOR}.policy_loss.loss_mode": "sapo", f"{ROLLOUT}.n": 4},
        [f"{ACTOR}.loss_agg_mode=token-mean", "policy_loss.loss_mode=sapo", "seq-mean-token-mean"],
    ),
    "double filtering without a section of ours": (
        "",
        {"algorithm.adv_estimator": "scalerl", f"{ROLLOUT}.n": 4, "algorithm.filter_groups.enable": True},
        ["algorithm.filter_groups.enable=True", "zero_variance=keep"],
    ),
    "rejection after the trainer has counted": (
        "advantage",
        {f"{ROLLOUT}.n": 4, "algorithm.rollout_correction.rollout_rs": "token_k1"},
        ["algorithm.rollout_correction.rollout_rs"],
    ),
    "distillation": ("recipe", {"distillation.enabled": True}, ["distillation.enabled=True", "prompt-mean"]),
    "distillation over dropped prompts": (
        "advantage",
        {f"{ROLLOUT}.n": 4, "distillation.enabled": True},
        ["distillation.enabled=True", "set algorithm.scalerl.zero_variance=keep, or distillation.enabled=False"],
    ),
    "distillation over truncated responses that are left out": (
        "[sampling_ratio,advantage]",
        {
            f"{ROLLOUT}.n": 4,
            "algorithm.scalerl.zero_variance": "keep",
            "algorithm.scalerl.reward_shaping": {"exclude_truncated": {}},
            "distillation.enabled": True,
        },
        [
            "distillation.enabled=True with algorithm.scalerl.reward_shaping.exclude_truncated",
            "set distillation.enabled=False, or delete the shaping "
            "(~algorithm.scalerl.reward_shaping.exclude_truncated)",
        ],
    ),
    "rejection in verl's bypass loss after the trainer has counted": (
        "[sampling_ratio,advantage]",
        {
            f"{ROLLOUT}.n": 4,
            f"{ACTOR}.policy_loss.loss_mode": "bypass_mode",
            f"{CORRECTION}.rollout_rs": "token_k1",
        },
        [f"{CORRECTION}.rollout_rs masks tokens"],
    ),
    "critic of our advantages": (
        "recipe",
        {"critic.enable": True},
        ["critic.enable=True", "adv_estimator=scalerl", "set critic.enable=False"],
    ),
    "critic under the prompt average": (
        "dapo",
        {"critic.enable": True, "critic.loss_agg_mode": "prompt-mean"},
        ["critic.loss_agg_mode=prompt-mean", "set critic.loss_agg_mode=token-mean, or critic.enable=False"],
    ),
    "critic of GAE under the prompt average": (
        "prompt_mean",
        {"critic.enable": True, "critic.loss_agg_mode": "prompt-mean"},
        ["critic.loss_agg_mode=prompt-mean", "set critic.loss_agg_mode=token-mean"],
    ),
    "verl's estimator beside a reward shaping": (
        "[recipe,length_penalty]",
        {"algorithm.adv_estimator": "grpo"},
        [
            "algorithm.adv_estimator=grpo",
            "delete them (~algorithm.scalerl.adv_norm ~algorithm.scalerl.zero_variance)",
        ],
    ),
    "length penalty of another type": (
        "recipe",
        {"algorithm.scalerl.reward_shaping": {"length_penalty": {"max_length": "5"}}},
        ["algorithm.scalerl.reward_shaping.length_penalty.max_length='5'", "whole number"],
    ),
}


@dataclass(frozen=True)
class Bonus(reward_shaping.RewardShaping):
    amount: float


@pytest.mark.fault("group of one, std of 0, float noise of equal rewards: huge or NaN advantages")
@pytest.mark.parametrize("fault", REFUSALS)
def test_contradiction_is_refused_with_its_key(fault: str) -> None:
    check_refusal(*REFUSALS[fault])


@pytest.mark.parametrize("presets", ["recipe", "[recipe,pipeline]", "dapo", "ppo_off_policy"])
@pytest.mark.parametrize("shapings", [{}, {"exclude_truncated": {}}])
def test_kl_loss_and_entropy_compose_with_prompt_averages_and_what_leaves_responses_out(
    presets: str, shapings: dict[str, Any]
) -> None:
    terms = {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.entropy_coeff": 0.01}
    plain = find_problems(changed(presets, {}))
    if presets != "dapo":
        terms["algorithm.scalerl.reward_shaping"] = shapings
    assert find_problems(changed(presets, terms)) == plain


def test_sapo_is_fine_with_the_mode_it_uses() -> None:
    changes = {
        f"{ACTOR}.policy_loss.loss_mode": "sapo",
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
        f"{ROLLOUT}.n": 4,
    }
    assert find_problems(changed("advantage", changes)) == []


def test_shaping_without_an_option_it_needs_is_refused_at_start(
    only_config_checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_shaping, "_REGISTRY", {"bonus": Bonus})
    with pytest.raises(ScaleRLConfigError, match=r"algorithm\.scalerl\.reward_shaping\.bonus\.amount is missing"):
        startup.prepare_run(changed("recipe", {"algorithm.scalerl.reward_shaping": {"bonus": {}}}))
    assert only_config_checks == []


def _loss_of_verl(name: str, scale: float, mode: str) -> float:
    """The loss called ``name`` on one fixed random micro-batch, all advantages times ``scale``."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, 6)
    log_prob = -2 * torch.rand(shape, generator=generator, dtype=torch.float64)
    old_log_prob = log_prob + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    advantages = 4 * torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.arange(6)[None, :] < torch.tensor([6, 3, 5, 2])[:, None]
    config = FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    config.global_batch_info.update(dp_size=1, batch_num_tokens=16, global_batch_size=4)
    object.__setattr__(config.policy_loss, "loss_mode", name)
    object.__setattr__(config.policy_loss, "dro_beta", 0.5)
    object.__setattr__(config.policy_loss, "clip_cov_ratio", 0.5)
    object.__setattr__(config.policy_loss, "kl_cov_ratio", 0.5)
    object.__setattr__(config.policy_loss, "rollout_correction", {"bypass_mode": True})
    torch.manual_seed(0)
    loss, _ = POLICY_LOSS_REGISTRY[name](old_log_prob, log_prob, advantages * scale, mask, mode, config)
    return float(loss)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2", "megatron", "veomni", "torchtitan"])
def test_prompt_average_gets_a_config_class_for_each_of_verl_s_engines(
    monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Once more for a config that was prepared already."""
    monkeypatch.setenv(ACTIVE_ENV, "1")
    group = {"fsdp": "dp", "fsdp2": "dp"}.get(strategy, strategy)
    config = compose_config(f"model_engine={group}", "+scalerl=prompt_mean")
    assert find_problems(config) == []
    given = config.actor_rollout_ref.actor._target_.rpartition(".")[2]
    for _ in range(2):
        startup._select_actor_config(config)
        assert find_problems(config) == []
    kind = get_class(config.actor_rollout_ref.actor._target_)
    assert kind.__name__ == f"ScaleRL{given}" and issubclass(kind, getattr(verl.workers.config, given))


def test_prompt_average_with_somebody_else_s_class_of_the_actor_is_refused() -> None:
    (problem,) = find_problems(changed("prompt_mean", {f"{ACTOR}._target_": "mine.ActorConfig"}))
    assert f"{ACTOR}._target_=mine.ActorConfig" in problem and "verl.workers.config.FSDPActorConfig" in problem


@pytest.mark.parametrize("name", sorted(POLICY_LOSS_REGISTRY))
def test_prompt_average_is_refused_exactly_for_losses_it_would_not_be_exact_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt weights in the advantages need a loss that scales with them and follows the aggregation mode."""
    monkeypatch.setenv(ACTIVE_ENV, "1")
    plain, doubled = _loss_of_verl(name, 1.0, "token-sum"), _loss_of_verl(name, 2.0, "token-sum")
    scales = doubled == pytest.approx(2 * plain, rel=1e-9)
    follows = _loss_of_verl(name, 1.0, "seq-mean-token-sum") == pytest.approx(plain / 4, rel=1e-9)
    config = changed("prompt_mean", {f"{ACTOR}.policy_loss.loss_mode": name})
    with open_dict(config):
        config.actor_rollout_ref.rollout.calculate_log_probs = True
        config.algorithm.rollout_correction.bypass_mode = True
    assert (find_problems(config) == []) is (scales and follows)
