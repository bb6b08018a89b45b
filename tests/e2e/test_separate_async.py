# SPDX-License-Identifier: Apache-2.0
"""Disaggregated training: two FSDP2 trainer ranks, one vLLM replica, weights over gloo."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from tests.e2e.conftest import RunVerl
from tests.e2e.launching import GROUP_SIZE, NUM_PROMPTS, VerlRun
from tests.e2e.weights import compare_updates

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 2
LOW, HIGH, ANSWER = 6, 9, 5


@pytest.fixture(scope="module")
def run(run_verl: RunVerl, tiny_assets: Path) -> VerlRun:
    """verl's separate_async with our loss, prompt average, estimator and loop by name; two updates a step."""
    return run_verl(
        "async",
        f"data.train_files={tiny_assets}/mixed.parquet",
        "trainer.v1.trainer_mode=separate_async",
        "actor_rollout_ref.hybrid_engine=False",
        "trainer.v1.separate_async.parameter_sync_step=2",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={NUM_PROMPTS // 2}",
        "trainer.n_gpus_per_node=2",
        "ray_kwargs.ray_init.num_gpus=3",
        f"trainer.total_training_steps={STEPS}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=forced_interruption",
        # A random model opens no thinking: all it writes counts as such.
        "++algorithm.scalerl.interruption={start_marker: null, phrase: '</think>', "
        f"thinking_budget: [{LOW}, {HIGH}], answer_budget: {ANSWER}}}",
        # The 'flush' fault of verl shows up only when INFO is enabled.
        env={"VERL_LOGGING_LEVEL": "INFO"},
    )


def test_disaggregated_run_ends_well(run: VerlRun) -> None:
    assert run.code == 0, run.tail()
    assert run.leftover_processes == 0
    assert sorted(run.metrics) == list(range(1, STEPS + 1))


def test_hybrid_engine_off_with_info_logging_does_not_crash(run: VerlRun) -> None:
    assert "hybrid replicas disabled" in run.log
    assert "unexpected keyword argument 'flush'" not in run.log


def test_two_ranks_send_exactly_their_weights_over_gloo(run: VerlRun) -> None:
    assert compare_updates(run.folder / "weights") == STEPS + 1
    assert run.metrics[1]["scalerl/pipeline/synced_bytes_sum"] > 0


def test_heads_and_the_first_batch_of_both_sides_are_compared(run: VerlRun) -> None:
    """Two trainer ranks and the separate generator; what is trained first was sampled under the same weights."""
    assert "trainer off by" in run.log and "(2 processes" in run.log
    assert 0 <= run.metrics[1]["scalerl/mismatch/first_batch_log_ratio_abs_max"] < 1e-4
    assert "scalerl/mismatch/first_batch_log_ratio_abs_max" not in run.metrics[2]


def test_policy_loss_runs_against_the_sampling_time_log_probs(run: VerlRun) -> None:
    """The first batch is on-policy; what was generated before an update and trained after it is not."""
    assert run.metrics[1]["scalerl/mismatch/log_ratio_abs_max"] >= 0
    off_policy = max(metrics["scalerl/mismatch/log_ratio_abs_max"] for metrics in run.metrics.values())
    assert off_policy > 1e-4, "every ratio is 1: old log-probs were recomputed, truncation could never act"


def test_interruption_goes_with_weight_updates(run: VerlRun) -> None:
    for metrics in run.metrics.values():
        interrupted = metrics["scalerl/length/interrupted_fraction"]
        assert interrupted > 0.5, "a random model hardly ever ends or closes anything by itself"
        assert metrics["scalerl/length/injected_tokens_sum"] == pytest.approx(interrupted * NUM_PROMPTS * GROUP_SIZE)
        assert metrics["scalerl/length/thinking_tokens_mean"] <= HIGH
        assert metrics["scalerl/length/truncated_fraction"] > 0, "its answers use up their budget"
        assert math.isfinite(metrics["scalerl/mismatch/log_ratio_abs_max"])


def test_ledger_counts_trainer_and_generator_through_an_asynchronous_run(run: VerlRun) -> None:
    """Three devices: two trainer ranks, one replica. Each step holds two updates, whose tokens all count."""
    ledger = [
        {key.removeprefix("scalerl/compute/"): value for key, value in run.metrics[step].items() if "/compute/" in key}
        for step in range(1, STEPS + 1)
    ]
    tokens = 0
    for step, spent in enumerate(ledger, 1):
        tokens += run.metrics[step]["scalerl/data/generated_tokens_sum"]
        assert (spent["steps"], spent["generated_tokens"]) == (step, tokens)
        assert 0 < spent["trained_tokens"] <= tokens and spent["wasted_gpu_hours"] == spent["wasted_tokens"] == 0
    for name in ("gpu_hours", "trained_tokens", "model_flops"):
        assert all(later[name] > earlier[name] for earlier, later in pairwise(ledger)), name
    # From taking the devices on: start-up, too, but no more than the run took.
    stepped = 3 * sum(run.metrics[step]["timing_s/step"] for step in range(1, STEPS + 1))
    assert stepped < 3600 * ledger[-1]["gpu_hours"] < 3 * run.seconds
