# SPDX-License-Identifier: Apache-2.0
"""Disaggregated training: two FSDP2 trainer ranks, one vLLM replica, weights over gloo."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from tests.e2e.launching import GROUP_SIZE, VerlRun, first_metrics
from tests.e2e.prompts_ahead import BATCH, EASY, HIGH, STEPS, read_lines
from tests.e2e.weights import compare_updates

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

Metrics = dict[int, dict[str, float]]


@pytest.fixture(scope="module")
def run(asynchronous_run: VerlRun) -> VerlRun:
    """verl's separate_async with our loss, prompt average, estimator and loop by name; two updates a step."""
    return asynchronous_run


@pytest.fixture(scope="module")
def metrics(run: VerlRun) -> Metrics:
    assert run.code == 0, run.tail()
    return first_metrics(run)


def test_disaggregated_run_ends_well(run: VerlRun) -> None:
    assert run.code == 0, run.tail()
    assert run.leftover_processes == 0
    assert sorted(first_metrics(run)) == list(range(1, STEPS + 1))


def test_no_step_can_be_without_a_mixed_group(run: VerlRun) -> None:
    """What the checks below need of the order of the data, whatever of it trains first."""
    handed: dict[int, list[int]] = {}
    for line in read_lines(run.folder / "weights" / "prompts.jsonl"):
        if line["event"] == "handed out":
            handed.setdefault(line["step"], []).append(line["row"])
    assert [len(rows) for rows in handed.values()] == [2 * BATCH] + [BATCH] * (STEPS - 1)
    assert all(len(EASY.intersection(rows)) < BATCH for rows in handed.values()), handed


def test_hybrid_engine_off_with_info_logging_does_not_crash(run: VerlRun) -> None:
    assert "hybrid replicas disabled" in run.log
    assert "unexpected keyword argument 'flush'" not in run.log


def test_two_ranks_send_exactly_their_weights_over_gloo(run: VerlRun, metrics: Metrics) -> None:
    assert compare_updates(run.folder / "weights") == STEPS + 1
    assert metrics[1]["scalerl/pipeline/synced_bytes_sum"] > 0


def test_heads_and_the_first_batch_of_both_sides_are_compared(run: VerlRun, metrics: Metrics) -> None:
    """Two trainer ranks and the separate generator; what is trained first was sampled under the same weights."""
    assert "trainer off by" in run.log and "(2 processes" in run.log
    assert 0 <= metrics[1]["scalerl/mismatch/first_batch_log_ratio_abs_max"] < 1e-4
    assert "scalerl/mismatch/first_batch_log_ratio_abs_max" not in metrics[2]


def test_policy_loss_runs_against_the_sampling_time_log_probs(metrics: Metrics) -> None:
    """The first batch is on-policy; what was generated before an update and trained after it is not."""
    assert metrics[1]["scalerl/mismatch/log_ratio_abs_max"] >= 0
    off_policy = max(values["scalerl/mismatch/log_ratio_abs_max"] for values in metrics.values())
    assert off_policy > 1e-4, "every ratio is 1: old log-probs were recomputed, truncation could never act"


@pytest.mark.works_with(
    "verl's asynchronous trainers",
    "CISPO",
    "prompt average",
    "advantages",
    "curriculum",
    "FP32 head",
    "interruption",
    "fast front end",
)
def test_interruption_goes_with_weight_updates(metrics: Metrics) -> None:
    for values in metrics.values():
        interrupted = values["scalerl/length/interrupted_fraction"]
        assert interrupted > 0.5, "a random model hardly ever ends or closes anything by itself"
        assert values["scalerl/length/injected_tokens_sum"] == pytest.approx(interrupted * BATCH * GROUP_SIZE)
        assert values["scalerl/length/thinking_tokens_mean"] <= HIGH
        assert values["scalerl/length/truncated_fraction"] > 0, "its answers use up their budget"
        assert math.isfinite(values["scalerl/mismatch/log_ratio_abs_max"])


def test_ledger_counts_trainer_and_generator_through_an_asynchronous_run(run: VerlRun, metrics: Metrics) -> None:
    """Three devices: two trainer ranks, one replica. Each step holds two updates, whose tokens all count."""
    ledger = [
        {key.removeprefix("scalerl/compute/"): value for key, value in metrics[step].items() if "/compute/" in key}
        for step in range(1, STEPS + 1)
    ]
    tokens = 0
    for step, spent in enumerate(ledger, 1):
        tokens += metrics[step]["scalerl/data/generated_tokens_sum"]
        assert (spent["steps"], spent["generated_tokens"]) == (step, tokens)
        assert 0 < spent["trained_tokens"] <= tokens and spent["wasted_gpu_hours"] == spent["wasted_tokens"] == 0
    for name in ("gpu_hours", "trained_tokens", "model_flops"):
        assert all(later[name] > earlier[name] for earlier, later in pairwise(ledger)), name
    # From taking the devices on: start-up, too, but no more than the run took.
    stepped = 3 * sum(metrics[step]["timing_s/step"] for step in range(1, STEPS + 1))
    assert stepped < 3600 * ledger[-1]["gpu_hours"] < 3 * run.seconds
