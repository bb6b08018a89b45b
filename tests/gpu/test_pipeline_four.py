# SPDX-License-Identifier: Apache-2.0
"""pipeline_rl on four GPUs: two FSDP ranks train; one engine of two ranks generates, or two engines of one."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.launching import VerlRun, launch_verl, make_assets, make_even_model
from tests.e2e.pipeline_data import read_responses
from tests.e2e.weights import compare_updates
from tests.gpu.test_pipeline import PREFIX, STEPS, K, overrides_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs: two train, two generate"),
]
ENGINES = {"one engine of two ranks": (2, "host"), "two engines of one rank": (1, "device")}
"""Ranks of an engine, and where weights wait for the swap."""


@pytest.fixture(scope="module", params=ENGINES)
def engines(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def run(engines: str, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    pytest.importorskip("flash_attn", reason="packed sequences need flash-attn")
    ranks, staging = ENGINES[engines]
    assets = make_assets(tmp_path_factory.mktemp("assets"))
    replaced = ("trainer.n_gpus_per_node=", "actor_rollout_ref.rollout.tensor_model_parallel_size=")
    lines = [
        *(line for line in overrides_of(assets) if not line.startswith(replaced)),
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={ranks}",
        f"trainer.v1.pipeline_rl.staging={staging}",
        f"actor_rollout_ref.model.path={make_even_model(assets, assets / 'even')}",
    ]
    return launch_verl(tmp_path_factory.mktemp("four"), assets, lines, {})


def test_run_ends_well_and_loses_nothing(run: VerlRun) -> None:
    assert run.code == 0, run.tail()
    assert sorted(run.metrics) == list(range(1, STEPS + 1))
    for metrics in run.metrics.values():
        assert metrics[f"{PREFIX}/tokens_lost"] == 0 and metrics[f"{PREFIX}/recomputed_tokens"] == 0


def test_every_generator_takes_every_version(run: VerlRun, engines: str) -> None:
    """Weights of an engine of one rank are compared as a whole; those of two ranks show in the log-probs below."""
    assert run.code == 0, run.tail()
    ranks, _ = ENGINES[engines]
    assert {metrics[f"{PREFIX}/replicas"] for metrics in run.metrics.values()} == {2 / ranks}
    if ranks == 1:
        assert compare_updates(run.folder / "weights") >= STEPS + 1


def test_versions_respect_the_bound(run: VerlRun) -> None:
    assert run.code == 0, run.tail()
    ages = {
        response.step - 1 - version
        for response in read_responses(run.folder / "weights")
        for version, _ in response.runs
    }
    assert min(ages) >= 0 and max(ages) <= K


def test_trainer_and_generator_agree_as_on_one_rank(run: VerlRun) -> None:
    assert run.code == 0, run.tail()
    assert run.metrics[1]["scalerl/mismatch/log_ratio_abs_mean"] < 0.05
