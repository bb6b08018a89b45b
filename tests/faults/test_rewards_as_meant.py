# SPDX-License-Identifier: Apache-2.0
"""Which rewards are equal and which responses correct: as the task meant it, at any scale, before any shaping."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from scalerl_verl.advantage import classify_groups, rounding_error, scalerl_advantages
from scalerl_verl.advantage import shaping_step as reward_shaping
from scalerl_verl.advantage import step as training_step
from scalerl_verl.advantage.step import advantage_step
from scalerl_verl.upstream.activation import ACTIVE_ENV
from scalerl_verl.verl import training_step as patches
from scalerl_verl.verl.algorithms import estimate_advantages


@pytest.fixture(autouse=True)
def checked_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the driver's start-up check had passed."""
    monkeypatch.setenv(ACTIVE_ENV, "1")


def kind(rewards: list[float], **options: Any) -> str:
    rewards_B = np.array(rewards, dtype=np.float64)
    return classify_groups(rewards_B, ["x"] * len(rewards), np.ones(len(rewards), dtype=bool), **options).kind_P[0]


@pytest.mark.parametrize(
    "rewards",
    [[1e6, 1e6 + 1], [-1e6, -1e6 + 1], [1e7, 1e7 + 5], [0.0, 1e-6], [0.0, 1e-9], [1.0, 1.0 + 1e-6], [1e-6, 1.001e-6]],
)
def test_rewards_that_fp32_tells_apart_train_at_any_scale(rewards: list[float]) -> None:
    """Each pair is 8 or more units of FP32 apart; centred and normalised, two different rewards are -1 and 1."""
    assert len(set(np.float32(rewards).tolist())) == 2
    result = scalerl_advantages(np.array(rewards), ["x", "x"], np.ones(2, dtype=bool))
    assert result.groups.kind_P == ("mixed",)
    np.testing.assert_allclose(result.advantages_B, [-1.0, 1.0], rtol=1e-9)


@pytest.mark.parametrize("scale", [1.0, -1.0, 1e6, 1e-6, 3.0])
def test_rounding_of_equal_rewards_never_trains(scale: float) -> None:
    equal = [[0.1 * 3, 0.3], [0.1 + 0.2, 0.3], [0.7 - 0.4, 0.3], [1 / 3 + 1 / 3 + 1 / 3, 1.0]]
    for rewards in equal:
        assert kind([scale * reward for reward in rewards]) == ("all_right" if scale > 0 else "all_wrong")
        in_fp32 = np.float32([scale * reward for reward in rewards])
        in_fp32[0] = np.nextafter(in_fp32[0], np.float32(np.inf) * np.sign(in_fp32[0]))
        assert kind(in_fp32.tolist()) == ("all_right" if scale > 0 else "all_wrong")


def test_the_tolerance_is_four_units_of_fp32() -> None:
    one, unit = 1.0, 2.0**-23
    assert kind([one, one + 4 * unit]) == "all_right" and kind([one, one + 5 * unit]) == "mixed"
    assert rounding_error([0.0, 1.0, -2.0][:2]).tolist() == [1e-12, 4 * unit]


def test_what_cancels_is_zero_and_zero_is_wrong() -> None:
    assert 0.1 + 0.2 - 0.3 != 0.0
    assert kind([0.1 + 0.2 - 0.3, 0.0]) == "all_wrong"
    assert kind([1e-7] * 3) == "all_right"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rewards_in_parts_on_several_tokens_equal_the_whole(dtype: torch.dtype) -> None:
    """0.1 + 0.2 on two tokens, 0.3 on one: bfloat16 rounds each part by up to 2e-3 of it. 1 and 0.99 still differ."""
    rewards_BT = torch.zeros(4, 3, dtype=dtype)
    rewards_BT[0, 0], rewards_BT[0, 1], rewards_BT[1, 2], rewards_BT[2, 2], rewards_BT[3, 2] = 0.1, 0.2, 0.3, 1.0, 0.99
    ids = np.array(["a", "a", "b", "b"])
    actor = SimpleNamespace(loss_agg_mode="token-sum", policy_loss=SimpleNamespace(loss_mode="vanilla"))
    config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(actor=actor), algorithm=SimpleNamespace(adv_estimator="scalerl")
    )
    with advantage_step(config, {}) as step:
        estimate_advantages(rewards_BT, torch.ones(4, 3, dtype=torch.bool), ids, OmegaConf.create({}))
    assert step.result is not None and step.result.groups.kind_P == ("all_right", "mixed")


def shaped_step(monkeypatch: pytest.MonkeyPatch, scores: list[float], came_off: float, lengths: list[int]) -> Any:
    """A training step of verl's own function with a length penalty, after ``came_off`` was taken off each reward."""
    monkeypatch.setattr(training_step, "read_extra_fields", lambda batch: [{}] * len(batch.tags))
    monkeypatch.setattr(training_step, "engine_context", lambda *_: None)
    monkeypatch.setattr(training_step, "read_hf_config", lambda _: None)
    config: DictConfig = OmegaConf.create(
        {
            "algorithm": {
                "adv_estimator": "scalerl",
                "scalerl": {"reward_shaping": {"length_penalty": {"max_length": 10, "cache_length": 5}}},
            },
            "actor_rollout_ref": {"actor": {"loss_agg_mode": "token-sum", "policy_loss": {"loss_mode": "vanilla"}}},
        }
    )
    mask_BT = torch.arange(10)[None, :] < torch.tensor(lengths)[:, None]
    scores_BT = torch.zeros(mask_BT.shape)
    scores_BT[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = torch.tensor(scores)
    rewards_BT = scores_BT.clone()
    rewards_BT[:, 0] -= came_off
    tensors = {"response_mask": mask_BT.long(), "token_level_scores": scores_BT, "token_level_rewards": rewards_BT}
    uids = np.array(["a"] * len(scores), dtype=object)
    data = DataProto(batch=TensorDict(tensors, batch_size=len(scores)), non_tensor_batch={"uid": uids})
    builders = {spec.target: spec.build for spec in patches.SPECS}
    compute = builders["compute_advantage_for_multi_trajectories"](compute_advantage_for_multi_trajectories, None)
    with advantage_step(config, {}) as step:
        step.shapings, step.max_response_length = reward_shaping.read_shapings(config), 10
        step.config, step.keep_rewards = config, True
        step.batch = SimpleNamespace(tags=[{"response_len": length, "seq_len": length + 1} for length in lengths])
        compute(data, [f"a_{row}_0" for row in range(len(scores))], adv_estimator="scalerl", config=config.algorithm)
    step.count_outcomes()
    return step, data.batch["token_level_rewards"].sum(-1).tolist()


def test_a_response_is_correct_by_the_task_s_score_whatever_came_off_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.5 came off each, by a KL penalty say: 0, -3/5 and -1 fall on correct responses, nothing on the wrong one."""
    _, rewards = shaped_step(monkeypatch, [1.0, 1.0, 1.0, -1.0], 1.5, [5, 8, 10, 10])
    np.testing.assert_allclose(rewards, [-0.5, -1.1, -1.5, -2.5], rtol=1e-6)
    # And none becomes correct by what was added.
    _, rewards = shaped_step(monkeypatch, [-1.0, -1.0], -2.0, [10, 10])
    assert rewards == [1.0, 1.0]


@pytest.mark.parametrize(
    ("scores", "came_off", "lengths", "outcomes"),
    [
        ([1.0, 1.0], 2.0, [10, 10], (1, 0)),  # 1 - 2 - 1 = -2 each, below 0, yet all right
        ([-1.0, -1.0], -2.0, [10, 10], (0, 1)),  # -1 + 2 = 1 each, yet all wrong
        ([1.0, 0.0], 0.0, [10, 4], (0, 0)),  # 1 - 1 = 0 and 0: nothing to learn from, neither all right nor all wrong
    ],
)
def test_prompts_are_counted_as_right_or_wrong_by_the_task_s_score(
    monkeypatch: pytest.MonkeyPatch, scores: list[float], came_off: float, lengths: list[int], outcomes: tuple[int, int]
) -> None:
    step, _ = shaped_step(monkeypatch, scores, came_off, lengths)
    assert step.steps_without_signal() == [0]
    assert outcomes == tuple(step.metrics[f"scalerl/data/prompts_all_{kind}_sum"] for kind in ("right", "wrong"))
