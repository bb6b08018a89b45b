# SPDX-License-Identifier: Apache-2.0
"""The recipe in verl's colocate_async trainer: prompts a batch ahead, unfinished responses go on under new weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scalerl_verl.json_lines import read_records
from tests.e2e.conftest import RunVerl
from tests.e2e.interrupting import ANSWER, HIGH, PHRASE, PROBES, STEPS, make_inputs
from tests.e2e.launching import GROUP_SIZE, NUM_PROMPTS, VerlRun, kill, last_step, title_of
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


@pytest.mark.fault("an engine died, and every prompt is replaced by one that fails, too, without end")
def test_run_whose_engine_died_ends_and_says_so(
    run_verl: RunVerl, tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("dead-engine")
    probe = folder / "weights"
    probe.mkdir()
    # No group is graded and responses come one by one, so that the engine dies before a batch is complete.
    (probe / "gate.json").write_text(json.dumps(list(range(1000))))

    def end_engine(processes: set[int]) -> None:
        if (probe / "prompts.jsonl").exists():
            for process in processes:
                if title_of(process).startswith("VLLM::EngineCore"):
                    kill(process)

    lines = [*make_inputs(tiny_assets, folder), "trainer.val_before_train=False"]
    lines += ["reward.custom_reward_function.name=gated_score", "actor_rollout_ref.rollout.max_num_seqs=1"]
    run = run_verl("dead-engine", *lines, folder=folder, env=PROBES, each_second=end_engine)
    assert run.code != 0 and "generator 0 is dead" in run.log, run.tail()
    assert last_step(folder) == 0 and run.leftover_processes == 0
