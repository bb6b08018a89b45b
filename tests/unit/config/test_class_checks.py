# SPDX-License-Identifier: Apache-2.0
"""The start-up check of classes that verl makes by name."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf, open_dict

from scalerl_verl import names
from scalerl_verl.config.checks import find_problems
from scalerl_verl.verl import doors, startup
from tests.unit.composed import ACTOR, ROLLOUT, Refusal, changed, check_refusal

pytestmark = pytest.mark.usefixtures("clean_environment")

REFUSALS: dict[str, Refusal] = {
    "actor of a user's with a name of verl's": (
        "recipe",
        {f"{ACTOR}._target_": "mine.FSDPActorConfig"},
        [f"{ACTOR}._target_=mine.FSDPActorConfig", "prompt-mean", "verl.workers.config.FSDPActorConfig"],
    ),
    "loss section of a user's": (
        "cispo",
        {f"{ACTOR}.policy_loss._target_": "mine.Loss"},
        [f"{ACTOR}.policy_loss._target_=mine.Loss", "scalerl_cispo", "verl.workers.config.PolicyLossConfig"],
    ),
    "engine of a user's": (
        "prompt_mean",
        {f"{ACTOR}.strategy": "mine"},
        [f"{ACTOR}.strategy=mine", f"{names.LOSS_AGG_MODE}=prompt-mean", "fsdp2"],
    ),
    "no engine": ("cispo", {f"{ACTOR}.strategy": None}, [f"{ACTOR}.strategy=null", "fsdp2"]),
    "routing that FSDP does not replay": (
        "cispo",
        {f"{ROLLOUT}.enable_rollout_routing_replay": True},
        [f"{ROLLOUT}.enable_rollout_routing_replay=True with {ACTOR}.strategy=fsdp", "megatron", "replay=False"],
    ),
    "routing that Megatron is not told to replay": (
        "cispo",
        {
            f"{ROLLOUT}.enable_rollout_routing_replay": True,
            f"{ACTOR}.strategy": "megatron",
            f"{ACTOR}.megatron.router_replay.mode": "disabled",
        },
        [f"{ACTOR}.megatron.router_replay.mode=disabled", "set", "=R3"],
    ),
    "replay that nobody records": (
        "cispo",
        {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.router_replay.mode": "R3"},
        [f"{ACTOR}.megatron.router_replay.mode=R3", f"set {ROLLOUT}.enable_rollout_routing_replay=True"],
    ),
    "mode in capitals": ("cispo", {names.TRAINER_MODE: "Sync"}, [f"{names.TRAINER_MODE}=Sync", "mean sync?"]),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS.keys())
def test_class_that_cannot_be_ours_is_refused(refusal: Refusal) -> None:
    check_refusal(*refusal)


@pytest.mark.parametrize(
    "changes",
    [
        {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.router_replay.mode": "R3"},
        {f"{ROLLOUT}.moe_load_balance_metrics_interval": 10},
    ],
    ids=["replayed", "measured"],
)
def test_routing_is_recorded_where_something_reads_it(changes: dict[str, Any]) -> None:
    recorded = {f"{ROLLOUT}.enable_rollout_routing_replay": True}
    assert find_problems(changed("cispo", recorded | changes)) == []


@pytest.mark.parametrize("strategy", names.STRATEGIES)
def test_engines_of_verl_are_accepted(strategy: str) -> None:
    assert find_problems(changed("cispo", {f"{ACTOR}.strategy": strategy})) == []


def test_engine_and_classes_of_a_user_s_are_theirs_where_nothing_of_ours_trains() -> None:
    theirs = {
        f"{ACTOR}.strategy": "mine",
        f"{ACTOR}._target_": "mine.FSDPActorConfig",
        f"{ACTOR}.policy_loss._target_": "mine.Loss",
    }
    assert find_problems(changed("fast_frontend", theirs)) == []


@pytest.mark.parametrize("name", names.ACTOR_CLASSES)
def test_every_actor_of_verl_takes_prompt_mean_and_is_accepted_again(name: str) -> None:
    """Hydra's multirun checks a config that has our class already."""
    config = changed("prompt_mean", {f"{ACTOR}._target_": f"verl.workers.config.actor.{name}"})
    startup._select_actor_config(config)
    assert config.actor_rollout_ref.actor._target_ == f"scalerl_verl.loss.verl_config.ScaleRL{name}"
    assert find_problems(config) == []


def test_manager_that_is_empty_is_verl_s_own() -> None:
    config = changed("recipe", {})
    with open_dict(config):
        OmegaConf.update(config, names.AGENT_LOOP_MANAGER, "", force_add=True)
    doors.point_at_ours(config)
    assert names.select(config, names.AGENT_LOOP_MANAGER) == doors.MANAGER
