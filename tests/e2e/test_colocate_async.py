# SPDX-License-Identifier: Apache-2.0
"""The recipe in verl's colocate_async trainer: prompts a batch ahead, unfinished responses go on under new weights."""

from __future__ import annotations

import pytest

from scalerl_verl.json_lines import read_records
from tests.e2e.interrupting import ANSWER, HIGH, PHRASE, STEPS
from tests.e2e.launching import GROUP_SIZE, NUM_PROMPTS, VerlRun
from tests.e2e.weights import compare_updates

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def run(interrupting_run: VerlRun) -> VerlRun:
    return interrupting_run


def test_run_ends_well_and_leaves_nothing(run: VerlRun) -> None:
    assert run.code == 0, run.tail()
    assert run.leftover_processes == 0
    assert sorted(run.metrics) == list(range(STEPS + 1)), "0 is the validation before training"


def test_engine_holds_the_trainers_weights_after_every_update(run: VerlRun) -> None:
    assert compare_updates(run.folder / "weights") == STEPS + 1


def test_every_piece_of_the_recipe_acts_in_every_step(run: VerlRun) -> None:
    for metrics in (run.metrics[step] for step in range(1, STEPS + 1)):
        assert metrics["scalerl/data/prompts_mixed_sum"] == metrics["scalerl/data/prompts_sum"] == NUM_PROMPTS
        assert metrics["scalerl/data/rows_kept_sum"] == NUM_PROMPTS * GROUP_SIZE
        # Half of each group passes.
        assert metrics["scalerl/advantage/std"] == pytest.approx(1.0)
        assert metrics["scalerl/data/skipped_updates_sum"] == 0 and metrics["actor/grad_norm"] > 0
        assert metrics["scalerl/loss/nonfinite_tokens_sum"] == 0
        assert metrics["scalerl/data/curriculum_visits_sum"] == NUM_PROMPTS


def test_response_interrupted_by_an_update_keeps_its_budget(run: VerlRun) -> None:
    """An aborted response is sent again with what it has: one budget over all attempts.

    The model hardly ever closes its thinking within its budget, so most responses use all of it.
    """
    longest = HIGH + len(PHRASE.removesuffix("</think>")) + 1 + ANSWER
    for step in range(1, STEPS + 1):
        assert run.metrics[step]["scalerl/length/interrupted_fraction"] > 0
        assert HIGH < run.metrics[step]["response_length/max"] <= longest


def test_prompts_are_a_batch_ahead_and_each_trains_once(run: VerlRun) -> None:
    lines = read_records(run.folder / "weights" / "prompts.jsonl")
    handed, trained = ([line["uid"] for line in lines if line["event"] == event] for event in ("handed out", "trained"))
    assert len(handed) == NUM_PROMPTS * (STEPS + 1) and len(trained) == NUM_PROMPTS * STEPS
    assert len(set(trained)) == len(trained) and set(trained) <= set(handed)
