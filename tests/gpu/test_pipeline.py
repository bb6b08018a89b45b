# SPDX-License-Identifier: Apache-2.0
"""pipeline_rl on two GPUs: weights over NCCL into an engine that goes on, every request kept."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.e2e.launching import GROUP_SIZE, NUM_PROMPTS, VerlRun, launch_verl, make_assets
from tests.e2e.pipeline_data import Response, read_responses
from tests.e2e.weights import compare_updates
from tests.gpu.test_gpu_runs import GPU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: one trains, one generates"),
]

STEPS, K = 6, 2
PREFIX = "scalerl/pipeline"
PACKED = (
    "actor_rollout_ref.model.use_remove_padding=True",
    "+actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2",
)


def overrides_of(assets: Path) -> list[str]:
    """The whole recipe with packed sequences, as verl's users run it."""
    return [
        "+scalerl=[recipe,pipeline]",
        *(line for line in GPU if "use_remove_padding" not in line and "attn_implementation" not in line),
        *PACKED,
        f"data.train_files={assets}/mixed.parquet",
        "data.max_response_length=400",
        "actor_rollout_ref.rollout.max_model_len=432",
        "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        f"trainer.v1.pipeline_rl.max_staleness={K}",
        "+trainer.v1.sampler.sampler_kwargs.poll_interval_s=0.05",
        f"trainer.total_training_steps={STEPS}",
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    pytest.importorskip("flash_attn", reason="packed sequences need flash-attn")
    assets = make_assets(tmp_path_factory.mktemp("assets"))
    return launch_verl(tmp_path_factory.mktemp("pipeline"), assets, overrides_of(assets), {})


@pytest.fixture(scope="module")
def responses(run: VerlRun) -> list[Response]:
    assert run.code == 0, run.tail()
    return read_responses(run.folder / "weights")


def test_run_ends_well(run: VerlRun) -> None:
    assert run.code == 0, run.tail()
    assert sorted(run.metrics) == list(range(1, STEPS + 1))


def test_nccl_brings_every_version_unchanged(run: VerlRun) -> None:
    assert run.code == 0, run.tail()
    assert compare_updates(run.folder / "weights") == STEPS + 1


def test_updates_keep_every_request(run: VerlRun, responses: list[Response]) -> None:
    for metrics in run.metrics.values():
        assert metrics[f"{PREFIX}/tokens_lost"] == 0 and metrics[f"{PREFIX}/recomputed_tokens"] == 0
    assert sum(metrics[f"{PREFIX}/kept_requests"] for metrics in run.metrics.values()) > 0
    assert all(response.reissues == 0 for response in responses)
    groups = Counter(response.group for response in responses)
    assert len(groups) == STEPS * NUM_PROMPTS and set(groups.values()) == {GROUP_SIZE}


def test_versions_cover_every_token_and_respect_the_bound(responses: list[Response]) -> None:
    for response in responses:
        assert sum(count for _, count in response.runs) == len(response.tokens)
        versions = [version for version, _ in response.runs]
        assert versions == sorted(set(versions))
    ages = {response.step - 1 - version for response in responses for version, _ in response.runs}
    assert min(ages) >= 0 and max(ages) <= K
    assert max(len(response.runs) for response in responses) >= 2, "no response went through an update"


def test_weights_are_sent_in_the_generators_dtype(run: VerlRun) -> None:
    """bf16: two bytes a parameter, of which tied ones go once."""
    assert run.code == 0, run.tail()
    import torch

    sent = torch.load(run.folder / "weights" / "sent-0.pt", weights_only=True)
    for metrics in run.metrics.values():
        assert metrics[f"{PREFIX}/sent_gib"] * 2**30 == sum(2 * weight.numel() for weight in sent.values())


def test_trainer_and_generator_agree(run: VerlRun) -> None:
    """bf16 on both sides, and the KV of older weights: log-probs differ in the second digit, not in the first."""
    assert run.metrics[1]["scalerl/mismatch/log_ratio_abs_mean"] < 0.05
