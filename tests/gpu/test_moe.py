# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen3-MoE on GPUs: the recipe on one, PipelineRL-k on two, and what replaying the routing would change.

verl replays routing in its Megatron and VeOmni engines only. With FSDP it can record it; what replay is worth is
measured here on the recorded rows, with the weights that sampled them. ``-rP`` prints the numbers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.launching import GROUP_SIZE, NUM_PROMPTS, VerlRun, launch_verl, make_assets
from tests.e2e.weights import compare_updates
from tests.gpu.mixture import STEPS, K, compare, make_mixture, pipeline_lines, recipe_lines

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

LIMIT = 0.1
"""Of the mean |log-ratio| in bf16, as the start-up check allows of a first batch; a wrong weight gives 1 and more."""
PIPELINE = "scalerl/pipeline"


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, assets: Path, mixture: Path) -> VerlRun:
    folder = tmp_path_factory.mktemp("recorded")
    return launch_verl(folder, assets, recipe_lines(assets, mixture, recorded=True), {"PROBE_ROUTING": "1"})


def report(name: str, run: VerlRun) -> None:
    for step, metrics in sorted(run.metrics.items()):
        shown = {key: round(value, 6) for key, value in metrics.items() if "mismatch" in key or "rollout/moe" in key}
        print(f"{name}, step {step}: {shown}")


def check_training(run: VerlRun) -> None:
    assert run.code == 0, run.tail()
    assert sorted(run.metrics) == list(range(1, STEPS + 1))
    for metrics in run.metrics.values():
        assert metrics["scalerl/loss/nonfinite_tokens_sum"] == 0 and metrics["actor/grad_norm"] > 0
        assert metrics["scalerl/mismatch/log_ratio_abs_mean"] < LIMIT


def test_recipe_trains_a_mixture(tmp_path_factory: pytest.TempPathFactory, assets: Path, mixture: Path) -> None:
    """The engine holds the trainer's experts after every update, and computes what the trainer computes with them."""
    folder = tmp_path_factory.mktemp("recipe")
    run = launch_verl(folder, assets, recipe_lines(assets, mixture, recorded=False), {})
    check_training(run)
    report("not recorded", run)
    assert compare_updates(folder / "weights") == STEPS + 1


def test_recording_the_routing_changes_nothing_else(recorded: VerlRun) -> None:
    check_training(recorded)
    report("recorded", recorded)
    assert compare_updates(recorded.folder / "weights") == STEPS + 1


def test_replaying_the_routing_brings_both_sides_together(recorded: VerlRun, mixture: Path) -> None:
    """What router replay (R3) is worth: the rows of step 1 scored in bf16 by the weights that sampled them."""
    assert recorded.code == 0, recorded.tail()
    from transformers import AutoModelForCausalLM

    rows = torch.load(recorded.folder / "weights" / "routing-1.pt", weights_only=False)
    assert len(rows["responses"]) == NUM_PROMPTS * GROUP_SIZE
    # Four layers of positions of zeros would be rows that the engine left out.
    assert all((row[: len(row) - 1].sum((1, 2)) > 0).all() for row in rows["routed_experts"])
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.bfloat16).cuda().eval()
    own, replayed = (compare(model, rows, replay=replay) for replay in (False, True))
    print(f"own routing: {own}\nreplayed: {replayed}")
    assert own.mean < LIMIT and own.rerouted < 0.2, "the recorded experts are not those of these tokens"
    assert replayed.mean <= own.mean


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: one trains, one generates")
def test_pipeline_trains_a_mixture(tmp_path_factory: pytest.TempPathFactory, assets: Path, mixture: Path) -> None:
    folder = tmp_path_factory.mktemp("pipeline")
    run = launch_verl(folder, assets, pipeline_lines(assets, mixture), {})
    check_training(run)
    report(f"PipelineRL-{K}", run)
    assert compare_updates(folder / "weights") == STEPS + 1
    assert all(metrics[f"{PIPELINE}/tokens_lost"] == 0 for metrics in run.metrics.values())
