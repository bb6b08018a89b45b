# SPDX-License-Identifier: Apache-2.0
"""PPO-off-policy-k: k optimizer steps on each generated batch, ratios against the log-probs at sampling."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.e2e.compute_checks import check_ledger, read_states
from tests.e2e.conftest import RunVerl
from tests.e2e.launching import KL_AND_ENTROPY, NUM_PROMPTS, OVERLONG, VerlRun

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

K, STEPS = 4, 2


@pytest.fixture(scope="module")
def run(run_verl: RunVerl, tiny_assets: Path) -> VerlRun:
    return run_verl(
        "off_policy",
        f"data.train_files={tiny_assets}/mixed.parquet",
        # responses of 16 characters have no room for the paper's phrase
        "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent",
        f"trainer.v1.ppo_off_policy.num_updates={K}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={NUM_PROMPTS // K}",
        f"trainer.total_training_steps={STEPS}",
        *KL_AND_ENTROPY,
        *OVERLONG,
        presets=("+scalerl=[ppo_off_policy,cpu]", "+trainer.v1.sampler.sampler_kwargs.poll_interval_s=0.05"),
    )


def test_run_ends_well(run: VerlRun) -> None:
    assert run.code == 0, run.tail()
    assert sorted(run.metrics) == list(range(1, STEPS + 1))
    assert all(metrics["scalerl/pipeline/updates_per_batch"] == K for metrics in run.metrics.values())


def test_log_says_what_of_the_preset_is_overridden(run: VerlRun) -> None:
    key = "actor_rollout_ref.rollout.agent.default_agent_loop"
    line = f"{key}: forced_interruption in the preset ppo_off_policy, single_turn_agent in this run (command line)"
    assert f"[scalerl_verl]   {line}" in run.log
    assert "n_gpus_per_node:" not in run.log[: run.log.index("[scalerl_verl] active")]


def test_later_updates_of_a_batch_are_off_policy(run: VerlRun) -> None:
    """The first of the k updates is on-policy up to rounding; without the others no ratio would leave 1."""
    assert all(metrics["scalerl/mismatch/log_ratio_abs_max"] > 1e-3 for metrics in run.metrics.values()), [
        metrics["scalerl/mismatch/log_ratio_abs_max"] for metrics in run.metrics.values()
    ]


@pytest.mark.works_with("KL loss", "CISPO", "prompt average", "advantages", "curriculum", "FP32 head", "fast front end")
@pytest.mark.works_with(
    "entropy bonus", "CISPO", "prompt average", "advantages", "curriculum", "FP32 head", "fast front end"
)
def test_kl_loss_and_entropy_are_averages_over_prompts(run: VerlRun, tiny_assets: Path) -> None:
    """A random model is nearly uniform over its tokens; sums over tokens would be many times as large."""
    first, second = (run.metrics[step] for step in (1, 2))
    assert 0 < first["actor/kl_loss"] < second["actor/kl_loss"] < 1
    uniform = math.log(len(AutoTokenizer.from_pretrained(tiny_assets / "model")))
    assert 0.8 * uniform < first["actor/entropy_loss"] < uniform


@pytest.mark.works_with(
    "overlong shaping", "CISPO", "prompt average", "advantages", "curriculum", "FP32 head", "fast front end"
)
def test_overlong_shaping_lowers_the_rewards_that_train(run: VerlRun) -> None:
    """Wrong is -1 and right 1 without it: no other reward is below -1."""
    for metrics in run.metrics.values():
        assert -2 <= metrics["critic/score/min"] < -1 and metrics["critic/score/max"] <= 1
        assert metrics["scalerl/data/prompts_mixed_sum"] > 0


def test_ledger_counts_each_batch_once_however_many_updates_it_has(run: VerlRun) -> None:
    check_ledger(run, num_gpus=1, wall_s=run.seconds)
    assert [state["totals"]["steps"] for state in read_states(run)] == list(range(1, STEPS + 1))
