# SPDX-License-Identifier: Apache-2.0
"""A pipeline run that loses a generator; tests/e2e/test_pipeline.py has one that is killed and resumed."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.e2e.compute_checks import check_ledger
from tests.e2e.conftest import RunVerl
from tests.e2e.launching import NUM_PROMPTS, VerlRun, kill, last_step, title_of
from tests.e2e.pipeline_data import Response, read_responses
from tests.e2e.test_pipeline import LONG, PREFIX, RECIPE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

POISONED = 3
"""Row of the data whose reward is NaN where the reward function is `faulty_score`."""
WAITING = 25
"""Row of step 4 whose reward comes only when another generator is up in the place of the dead one."""
STEPS = 7
UP_AGAIN = re.compile(r"generator \d is up again")


@pytest.fixture(scope="module")
def bereaved(run_verl: RunVerl, tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """The whole recipe, k = 0, with two generators, one of which is killed in the middle; one row's reward is NaN."""
    folder = tmp_path_factory.mktemp("bereaved")
    (folder / "weights").mkdir()
    faults = folder / "weights" / "faults.json"
    faults.write_text(json.dumps({"poisoned": [POISONED], "waiting": [WAITING]}))
    done: list[int] = []

    def kill_one_generator(processes: set[int]) -> None:
        if done and any(UP_AGAIN.search(log.read_text()) for log in folder.glob("log-*.txt")):
            faults.write_text(json.dumps({"poisoned": [POISONED]}))
        if done or last_step(folder) < 2:
            return
        servers = sorted(p for p in processes if title_of(p).startswith("ray::PipelineHttpServer"))
        if len(servers) == 2:
            kill(servers[1])
            done.append(servers[1])
            (folder / "killed_at").write_text(str(time.time()))

    run = run_verl(
        "bereaved",
        *LONG,
        f"data.train_files={tiny_assets}/mixed.parquet",
        "trainer.v1.pipeline_rl.max_staleness=0",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "ray_kwargs.ray_init.num_gpus=3",
        f"trainer.total_training_steps={STEPS}",
        "reward.custom_reward_function.name=faulty_score",
        presets=RECIPE,
        folder=folder,
        each_second=kill_one_generator,
    )
    assert done, "no generator was killed: " + run.tail()
    return run


@pytest.mark.fault("a generator that died is lost for the rest of the run")
def test_training_goes_on_without_a_dead_generator_and_another_one_takes_its_place(bereaved: VerlRun) -> None:
    assert bereaved.code == 0, bereaved.tail()
    assert sorted(bereaved.metrics) == list(range(1, STEPS + 1))
    replicas = [metrics[f"{PREFIX}/replicas"] for _, metrics in sorted(bereaved.metrics.items())]
    assert replicas[0] == 2 and min(replicas) == 1 and replicas[-1] == 2
    assert re.search(r"generator \d is launched again: try 1 of 3", bereaved.log) and UP_AGAIN.search(bereaved.log)
    assert bereaved.leftover_processes == 0


def test_prompts_of_a_dead_generator_are_trained(bereaved: VerlRun) -> None:
    assert bereaved.code == 0, bereaved.tail()
    responses: list[Response] = read_responses(bereaved.folder / "weights")
    assert len({r.group for r in responses}) == STEPS * NUM_PROMPTS
    contents = {r.content for r in responses}
    assert len(contents) == 31, "the first pass over the data misses a prompt"


def test_group_with_a_reward_of_nan_is_tried_again_and_given_up(bereaved: VerlRun) -> None:
    """Fault: one poisoned row ends the run."""
    assert bereaved.code == 0, bereaved.tail()
    trained = [r.content for r in read_responses(bereaved.folder / "weights")]
    assert not [content for content in trained if f'"{POISONED}+1"' in content]
    counts = {
        name: sum(metrics[f"{PREFIX}/groups_{name}_sum"] for metrics in bereaved.metrics.values())
        for name in ("reissued", "given_up")
    }
    # The row comes twice in seven steps and is tried three times; the dead generator may add to the first.
    assert counts["given_up"] == 2 and counts["reissued"] >= 4
    assert "RewardError: the reward of a response is nan" in bereaved.log
    assert "groups started again:" in bereaved.log, "the trainer's warnings are not seen"


@pytest.mark.fault("a staleness bound of 0 or 1 that is off by one")
def test_k_0_is_exactly_on_policy_even_then(bereaved: VerlRun) -> None:
    """Fault: staleness bound 0 or 1 reported as off by one."""
    assert bereaved.code == 0, bereaved.tail()
    ages = {r.step - 1 - version for r in read_responses(bereaved.folder / "weights") for version, _ in r.runs}
    assert ages == {0}


def test_devices_of_a_dead_generator_are_still_held(bereaved: VerlRun) -> None:
    assert bereaved.code == 0, bereaved.tail()
    check_ledger(bereaved, num_gpus=3, wall_s=bereaved.seconds)
