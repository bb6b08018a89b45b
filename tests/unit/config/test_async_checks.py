# SPDX-License-Identifier: Apache-2.0
"""What verl's separate_async asserts in its trainer is known before Ray starts, all at once."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl_verl.config.checks import find_problems
from scalerl_verl.names import ACTOR, CHECKPOINT_BACKEND, ROLLOUT, TRAINER_MODE
from tests.unit.composed import changed

pytestmark = pytest.mark.usefixtures("clean_environment")

STEP, BATCH, MINI = (
    "trainer.v1.separate_async.parameter_sync_step",
    "data.train_batch_size",
    f"{ACTOR}.ppo_mini_batch_size",
)
SOUND: dict[str, Any] = {
    TRAINER_MODE: "separate_async",
    BATCH: 48,
    MINI: 12,
    STEP: 4,
    f"{ROLLOUT}.nnodes": 1,
    f"{ROLLOUT}.n_gpus_per_node": 8,
    CHECKPOINT_BACKEND: "nccl",
}


def problems_with(**changes: Any) -> list[str]:
    return find_problems(changed("cispo", SOUND | {key.replace("__", "."): value for key, value in changes.items()}))


def test_sound_run_is_accepted() -> None:
    assert problems_with() == []


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (MINI, 48, f"set {STEP}=1"),
        (STEP, 3, f"set {STEP}=4"),
        (BATCH, 50, "set train_batch_size=48"),
        (f"{ROLLOUT}.nnodes", 0, f"{ROLLOUT}.nnodes=0"),
        (f"{ROLLOUT}.n_gpus_per_node", 0, f"{ROLLOUT}.n_gpus_per_node=0"),
        (CHECKPOINT_BACKEND, "naive", f"{CHECKPOINT_BACKEND}=naive"),
    ],
)
def test_what_verl_asserts_is_refused(key: str, value: Any, says: str) -> None:
    (problem,) = find_problems(changed("cispo", SOUND | {key: value}))
    assert says in problem


def test_reward_model_needs_devices_of_its_own() -> None:
    model = {"enable": True, "model_path": "a/b"}
    (problem,) = problems_with(
        **{f"reward__reward_model__{key}": value for key, value in model.items()},
        reward__reward_model__rollout__name="vllm",
    )
    assert "enable_resource_pool=False" in problem and "set it True" in problem


def test_everything_is_said_at_once_and_by_verl_s_defaults() -> None:
    text = "\n".join(find_problems(changed("cispo", {TRAINER_MODE: "separate_async"})))
    assert all(key in text for key in (f"{ROLLOUT}.nnodes", CHECKPOINT_BACKEND))
