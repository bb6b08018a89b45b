# SPDX-License-Identifier: Apache-2.0
"""PipelineRL-k on the real stack: one trainer rank and vLLM replicas on the CPU, weights over gloo."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.e2e.compute_checks import check_ledger, read_states
from tests.e2e.conftest import RunVerl
from tests.e2e.launching import GROUP_SIZE, NUM_PROMPTS, VerlRun
from tests.e2e.pipeline_data import PiecewiseScorer, Response, read_responses
from tests.e2e.weights import compare_updates

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

STEPS, K = 22, 4
LONG = (
    "data.max_response_length=160",
    "actor_rollout_ref.rollout.max_model_len=192",
    # fewer slots than requests: some wait in the engine while weights change
    "actor_rollout_ref.rollout.max_num_seqs=24",
)
PRESETS = (
    # the recipe without its curriculum, which drops prompts: these tests count them
    "+scalerl=[setup,cispo,prompt_mean,advantage,fp32_head,pipeline,cpu]",
    "+trainer.v1.sampler.sampler_kwargs.poll_interval_s=0.05",
)
RECIPE = ("+scalerl=[recipe,pipeline,cpu]", *PRESETS[1:])
PREFIX = "scalerl/pipeline"


def pipeline(assets: Path, k: int, steps: int) -> list[str]:
    return [
        f"data.train_files={assets}/mixed.parquet",
        f"trainer.v1.pipeline_rl.max_staleness={k}",
        f"trainer.total_training_steps={steps}",
        *LONG,
    ]


@pytest.fixture(scope="module")
def run(run_verl: RunVerl, tiny_assets: Path) -> VerlRun:
    """k = 4 over 22 updates, validation in the middle of it.

    Most responses are short, and so are the steps that train them: a long one goes through several. The model learns
    little enough for that to stay so.
    """
    validation = ["trainer.test_freq=10", "actor_rollout_ref.rollout.val_kwargs.n=2"]
    uneven = [f"actor_rollout_ref.model.path={tiny_assets}/uneven", "actor_rollout_ref.actor.optim.lr=1e-4"]
    return run_verl("pipeline", *pipeline(tiny_assets, K, STEPS), *uneven, *validation, presets=PRESETS)


@pytest.fixture(scope="module")
def responses(run: VerlRun) -> list[Response]:
    assert run.code == 0, run.tail()
    return read_responses(run.folder / "weights")


def test_run_ends_well(run: VerlRun) -> None:
    assert run.code == 0, run.tail()
    assert run.leftover_processes == 0
    assert sorted(run.metrics) == list(range(1, STEPS + 1))
    assert any(name.startswith("val-") for name in run.metrics[10])


def test_every_version_reaches_the_engine_unchanged(run: VerlRun) -> None:
    assert compare_updates(run.folder / "weights") == STEPS + 1
    sent = [torch.load(run.folder / "weights" / f"sent-{n}.pt") for n in (0, STEPS)]
    assert any(not torch.equal(sent[0][name], sent[1][name]) for name in sent[0]), "training changed nothing"


def test_no_trained_token_is_older_than_k_versions(responses: list[Response]) -> None:
    ages = Counter(response.step - 1 - version for response in responses for version, _ in response.runs)
    assert 0 <= min(ages) and max(ages) <= K
    assert max(ages) >= 1, "nothing was off-policy: the bound was not tested"


@pytest.mark.fault("a request that spans versions carries one version")
def test_responses_straddle_versions_and_every_token_has_one(responses: list[Response]) -> None:
    """Fault: a request that spans versions carries one version label."""
    for response in responses:
        assert sum(count for _, count in response.runs) == len(response.tokens) == len(response.log_probs)
        versions = [version for version, _ in response.runs]
        assert versions == sorted(set(versions))
    spans = Counter(len(response.runs) for response in responses)
    assert max(spans) >= 3, f"no response went through several updates: {spans}"


@pytest.mark.fault("a request that spans versions carries one version")
def test_log_probs_are_those_of_the_weights_that_sampled_each_token(
    run: VerlRun, responses: list[Response], tiny_assets: Path
) -> None:
    """Recomputed piecewise under the recorded weights; under the version before they are others."""
    scorer = PiecewiseScorer(tiny_assets / "model", run.folder / "weights")
    chosen = sorted(responses, key=lambda response: len(response.runs))[-24:]
    errors, wrong = [], []
    for response in chosen:
        recorded = torch.tensor(response.log_probs)
        errors.append(float((scorer.score(response) - recorded).abs().max()))
        wrong.append(float((scorer.score(response, version_shift=-1) - recorded).abs().max()))
    # FP32 on both sides, other kernels: rounding of up to 160 steps of attention.
    assert max(errors) < 2e-4, errors
    assert min(wrong) > 10 * max(errors), "the weights of two versions are too alike for this test to tell them apart"


def test_updates_keep_requests_and_lose_nothing(run: VerlRun, responses: list[Response]) -> None:
    assert sum(metrics[f"{PREFIX}/kept_requests"] for metrics in run.metrics.values()) > STEPS
    for metrics in run.metrics.values():
        assert metrics[f"{PREFIX}/tokens_lost"] == 0 and metrics[f"{PREFIX}/recomputed_tokens"] == 0
        assert 0 < metrics[f"{PREFIX}/swap_s"] < metrics[f"{PREFIX}/pause_s"]
        assert metrics[f"{PREFIX}/transfer_s"] > 0
    assert all(response.reissues == 0 for response in responses)


def test_metrics_tell_what_the_data_say(run: VerlRun, responses: list[Response]) -> None:
    for step, metrics in run.metrics.items():
        ages: Counter[int] = Counter()
        for response in responses:
            if response.step == step:
                for version, count in response.runs:
                    ages[step - 1 - version] += count
        assert metrics[f"{PREFIX}/staleness_max"] == max(ages)
        assert [metrics[f"{PREFIX}/staleness_tokens/{age}_sum"] for age in range(K + 1)] == [
            ages[age] for age in range(K + 1)
        ]
        assert 0 <= metrics[f"{PREFIX}/generator_idle_fraction"] <= 1
        assert 0 <= metrics[f"{PREFIX}/trainer_idle_fraction"] <= 1


def test_no_prompt_is_lost_or_doubled_and_nothing_is_thrown_away(responses: list[Response]) -> None:
    groups = Counter(response.group for response in responses)
    assert len(groups) == STEPS * NUM_PROMPTS and set(groups.values()) == {GROUP_SIZE}
    # 176 prompts of a file of 32, in its order: five passes and half of a sixth.
    contents = Counter({response.group: response.content for response in responses}.values())
    assert Counter(contents.values()) == {6: 16, 5: 16}


def test_ledger_counts_trainer_and_generator(run: VerlRun, responses: list[Response]) -> None:
    check_ledger(run, num_gpus=2, wall_s=run.seconds)
    assert [state["totals"]["steps"] for state in read_states(run)] == list(range(1, STEPS + 1))
    sampled = sum(len(response.tokens) for response in responses)
    assert run.metrics[STEPS]["scalerl/compute/generated_tokens"] == sampled
