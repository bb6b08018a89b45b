# SPDX-License-Identifier: Apache-2.0
"""Who grades a run: reward managers of verl's V1 trainer, what they do to a pass, and those that it does not have."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
from verl.workers.reward_manager.registry import REWARD_MANAGER_REGISTRY

from scalerl_verl.advantage.passed import PassRule
from scalerl_verl.config.checks import find_problems
from scalerl_verl.config.cluster import num_devices
from scalerl_verl.config.reward_checks import MANAGER, MODEL, POOL, TAKES_PLACE
from tests.unit.composed import Refusal, changed, check_refusal

pytestmark = pytest.mark.usefixtures("clean_environment")

KWARGS = "reward.reward_kwargs"
OVERLONG = {f"{KWARGS}.overlong_buffer_cfg": {"enable": True, "len": 4, "penalty_factor": 1.0, "log": True}}
LIMIT = {f"{KWARGS}.max_resp_len": 8}
REFUSALS: dict[str, Refusal] = {
    "manager of the old reward loop": ("cispo", {MANAGER: "prime"}, [f"{MANAGER}=prime", f"set {MANAGER}=naive"]),
    "batch of the old reward loop": ("recipe", {MANAGER: "batch"}, [f"{MANAGER}=batch", "reward.num_workers"]),
    "old manager under its old key": (
        "cispo",
        {"reward_model.reward_manager": "prime"},
        ["reward_model.reward_manager=prime has no effect", f"set {MANAGER}=naive instead"],
    ),
    "overlong shaping under its oldest key": (
        "cispo",
        {"reward_model.overlong_buffer": {"len": 4096}},
        ["reward_model.overlong_buffer.len=4096 has no effect", f"set {KWARGS}.overlong_buffer_cfg.len=4096"],
    ),
    "overlong shaping that nobody applies": (
        "recipe",
        {**OVERLONG, **LIMIT},
        [f"{KWARGS}.overlong_buffer_cfg.enable=True is read by {MANAGER}=dapo only", f"{MANAGER}=naive"],
    ),
    "overlong shaping without a limit": (
        "recipe",
        {MANAGER: "dapo", **OVERLONG},
        [f"{KWARGS}.overlong_buffer_cfg.len=4, {KWARGS}.max_resp_len=null"],
    ),
    "overlong shaping longer than its limit": (
        "recipe",
        {MANAGER: "dapo", **OVERLONG, f"{KWARGS}.max_resp_len": 3},
        ["overlong_buffer_cfg.len=4", "max_resp_len=3"],
    ),
}

OF_MODEL = {f"{MODEL}.enable": True, f"{MODEL}.model_path": "Skywork/R", f"{MODEL}.rollout.name": "vllm"}
OWN_POOL = {POOL: True, f"{MODEL}.nnodes": 1, f"{MODEL}.n_gpus_per_node": 2}
REFUSALS |= {
    "reward model of no name": ("cispo", {**OF_MODEL, f"{MODEL}.model_path": None}, [f"{MODEL}.model_path is not set"]),
    "reward model without devices": ("recipe", {**OF_MODEL, POOL: True}, [f"{MODEL}.nnodes=0", "1 or more"]),
    "reward model wider than its devices": (
        "recipe",
        {**OF_MODEL, **OWN_POOL, f"{MODEL}.rollout.tensor_model_parallel_size": 4},
        [f"{MODEL}.nnodes x n_gpus_per_node = 2", "takes 4"],
    ),
    "groups chosen before a reward model grades them": (
        "cispo",
        {**OF_MODEL, "algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc"},
        ["algorithm.filter_groups.enable=True with a reward model", f"set {POOL}=True"],
    ),
}


@pytest.mark.parametrize("preset", ["recipe", "[recipe,pipeline]"])
def test_reward_model_with_devices_of_its_own_is_accepted_and_counted(preset: str) -> None:
    """Ray would wait for devices that nobody has, without a word."""
    without, config = changed(preset, {}), changed(preset, OF_MODEL | OWN_POOL)
    assert find_problems(config) == []
    assert num_devices(config) == num_devices(without) + 2


@pytest.mark.parametrize("fault", REFUSALS)
def test_reward_that_nobody_would_compute_is_refused(fault: str) -> None:
    check_refusal(*REFUSALS[fault])


def test_managers_that_are_refused_are_those_that_verl_s_v1_trainer_lacks() -> None:
    assert set(TAKES_PLACE) == set(REWARD_MANAGER_REGISTRY) - set(REWARD_MANAGER)
    assert set(TAKES_PLACE.values()) <= set(REWARD_MANAGER)


@pytest.mark.parametrize("changes", [{MANAGER: "dapo"}, {MANAGER: "dapo", **OVERLONG, **LIMIT}, {MANAGER: "remote"}])
def test_managers_of_verl_are_accepted(changes: dict[str, Any]) -> None:
    assert find_problems(changed("recipe", changes)) == []
    own = {"reward.reward_manager.source": "importlib", MANAGER: "prime", "reward.reward_manager.module.path": "m.py"}
    assert find_problems(changed("recipe", own)) == [], "a user's own may be called anything"


def grade(manager: str, compute_score: Any, num_tokens: int, **kwargs: Any) -> dict[str, Any]:
    """One response of ``num_tokens``, through verl's manager."""
    data = DataProto.from_dict(
        tensors={
            "responses": torch.arange(8)[None],
            "attention_mask": (torch.arange(10) < 2 + num_tokens).long()[None],
        },
        non_tensors={"data_source": np.array(["x"]), "reward_model": np.array([{"ground_truth": "1"}], dtype=object)},
    )
    config = OmegaConf.create({"reward": {"reward_kwargs": kwargs}})
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "1" * len(ids))

    async def run() -> dict[str, Any]:
        return await get_reward_manager_cls(manager)(config, tokenizer, compute_score).run_single(data)

    return asyncio.run(run())


def right(**_: Any) -> float:
    return 1.0


def wrong(**_: Any) -> dict[str, float]:
    return {"score": -1.0, "acc": 0.0}


async def right_later(**_: Any) -> dict[str, float]:
    return {"score": 1.0}


@pytest.mark.works_with("overlong shaping", "advantages", "curriculum")
@pytest.mark.parametrize(("compute_score", "passes"), [(right, True), (right_later, True), (wrong, False)])
@pytest.mark.parametrize("num_tokens", [3, 6, 8])
def test_penalty_of_overlong_shaping_is_no_failure(compute_score: Any, passes: bool, num_tokens: int) -> None:
    """The reward of a right answer falls from 1 to 0 over the last four tokens: what passed is asked of the task."""
    kwargs = {key.removeprefix(f"{KWARGS}."): value for key, value in {**OVERLONG, **LIMIT}.items()}
    found = grade("dapo", compute_score, num_tokens, **kwargs)
    reward = float(found["reward_score"])
    assert reward == (1.0 if passes else -1.0) - max(0, num_tokens - 4) / 4
    assert PassRule().judge([reward], [found["reward_extra_info"]]).tolist() == [passes]


@pytest.mark.parametrize("manager", ["naive", "dapo"])
def test_asynchronous_reward_is_awaited_and_judged(manager: str) -> None:
    found = grade(manager, right_later, 3)
    assert PassRule().judge([found["reward_score"]], [found["reward_extra_info"]]).tolist() == [True]
