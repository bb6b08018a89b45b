# SPDX-License-Identifier: Apache-2.0
"""The recipe in verl's colocate_async trainer: prompts a batch ahead, unfinished responses go on under new weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import RunVerl
from tests.e2e.launching import GROUP_SIZE, NUM_PROMPTS, VerlRun
from tests.e2e.weights import compare_updates

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 3


@pytest.fixture(scope="module")
def run(run_verl: RunVerl, tiny_assets: Path) -> VerlRun:
    return run_verl(
        "colocate-async",
        f"data.train_files={tiny_assets}/mixed.parquet",
        "trainer.v1.trainer_mode=colocate_async",
        # Trainer and generator share one logical GPU, but verl counts the rollout's by itself.
        "ray_kwargs.ray_init.num_gpus=2",
        f"trainer.total_training_steps={STEPS}",
        env={"PROBE_PROMPTS": "1"},
    )


def test_run_ends_well_and_leaves_nothing(run: VerlRun) -> None:
    assert run.code == 0, run.tail()
    assert run.leftover_processes == 0
    assert sorted(run.metrics) == list(range(1, STEPS + 1))


def test_engine_holds_the_trainers_weights_after_every_update(run: VerlRun) -> None:
    assert compare_updates(run.folder / "weights") == STEPS + 1


def test_every_piece_of_the_recipe_acts_in_every_step(run: VerlRun) -> None:
    for metrics in run.metrics.values():
        assert metrics["scalerl/data/prompts_mixed_sum"] == metrics["scalerl/data/prompts_sum"] == NUM_PROMPTS
        assert metrics["scalerl/data/rows_kept_sum"] == NUM_PROMPTS * GROUP_SIZE
        # Half of each group passes.
        assert metrics["scalerl/advantage/std"] == pytest.approx(1.0)
        assert metrics["scalerl/data/skipped_updates_sum"] == 0 and metrics["actor/grad_norm"] > 0
        assert metrics["scalerl/loss/nonfinite_tokens_sum"] == 0
        assert metrics["scalerl/data/curriculum_visits_sum"] == NUM_PROMPTS


def test_response_interrupted_by_an_update_keeps_its_budget(run: VerlRun) -> None:
    """An aborted response is sent again with what it has: one budget over all attempts."""
    assert all(metrics["response_length/max"] <= 16 for metrics in run.metrics.values())


def test_prompts_are_a_batch_ahead_and_each_trains_once(run: VerlRun) -> None:
    lines = [json.loads(line) for line in (run.folder / "weights" / "prompts.jsonl").read_text().splitlines()]
    handed, trained = ([line["uid"] for line in lines if line["event"] == event] for event in ("handed out", "trained"))
    assert len(handed) == NUM_PROMPTS * (STEPS + 1) and len(trained) == NUM_PROMPTS * STEPS
    assert len(set(trained)) == len(trained) and set(trained) <= set(handed)
