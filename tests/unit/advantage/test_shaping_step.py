# SPDX-License-Identifier: Apache-2.0
"""Reward shaping in verl's training step: what it sees, and what the estimators then make of its rewards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import tensordict_utils as tu
from verl.utils.transferqueue_utils import KVBatchMeta

from scalerl_verl.advantage import reward_shaping
from scalerl_verl.advantage.reward_shaping import Responses, RewardShaping
from scalerl_verl.config.checks import find_problems
from scalerl_verl.upstream.activation import ACTIVE_ENV
from scalerl_verl.verl import training_step as patches
from tests.steps import in_front_of
from tests.unit.composed import changed

MAX_LENGTH = 6
ROWS: dict[str, tuple[int, int, float]] = {
    # key: tokens that train, tokens of the response, reward
    "a_0_0": (2, 2, 1.0),
    "a_0_1": (1, 4, 1.0),
    "a_1_0": (6, 6, 1.0),
    "a_2_0": (3, 3, -1.0),
    "b_0_0": (6, 6, 1.0),
    "b_1_0": (2, 2, 1.0),
    "pad_0_0": (0, 1, 0.0),
}
"""Session a_0 has two outputs; its last one ends with 3 tokens of a tool. a_1 and b_0 were cut."""


@dataclass(frozen=True)
class PenalizeLength(RewardShaping):
    """-1/2 for responses at the limit that are right: of the kind that a length penalty is."""

    size: float = 0.5

    def shape(self, responses: Responses) -> np.ndarray:
        SEEN.append(responses)
        return responses.rewards_R - self.size * (responses.at_limit_R & (responses.rewards_R > 0))


class LeaveOutCut(RewardShaping):
    leaves_out: ClassVar[bool] = True

    def trains(self, responses: Responses) -> np.ndarray:
        return ~responses.at_limit_R


SEEN: list[Responses] = []


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(ACTIVE_ENV, "1")
    monkeypatch.setattr(reward_shaping, "_REGISTRY", {"penalty": PenalizeLength, "leave_out_cut": LeaveOutCut})
    SEEN.clear()
    yield


def batch_meta() -> KVBatchMeta:
    tags = [{"response_len": length} for _, length, _ in ROWS.values()]
    return KVBatchMeta(partition_id="train", keys=list(ROWS), tags=tags)


def make_data() -> DataProto:
    tokens, lengths, rewards = (torch.tensor(column) for column in zip(*ROWS.values(), strict=True))
    mask_BT = torch.arange(MAX_LENGTH)[None, :] < tokens[:, None]
    scores_BT = torch.zeros(mask_BT.shape)
    scores_BT[torch.arange(len(ROWS)), lengths - 1] = rewards
    tensors = {"response_mask": mask_BT.long(), "token_level_scores": scores_BT, "token_level_rewards": scores_BT}
    uid_B = np.array([key.split("_")[0] for key in ROWS], dtype=object)
    return DataProto(batch=TensorDict(tensors, batch_size=len(ROWS)), non_tensor_batch={"uid": uid_B})


class Trainer:
    """Stands for PPOTrainer: its `_compute_advantage` without the TransferQueue around it."""

    def __init__(self, estimator: str, mode: str, shaping: dict[str, Any]) -> None:
        actor = {"loss_agg_mode": mode, "policy_loss": {"loss_mode": "vanilla"}}
        section = (
            {"reward_shaping": shaping} if estimator != "scalerl" else {"adv_norm": "none", "reward_shaping": shaping}
        )
        self.config = OmegaConf.create(
            {
                "actor_rollout_ref": {"actor": actor},
                "algorithm": {"adv_estimator": estimator, "scalerl": section},
                "data": {"max_response_length": MAX_LENGTH},
            }
        )
        self.data = make_data()

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> str:
        builders = {spec.target: spec.build for spec in patches.SPECS}
        patched = builders["compute_advantage_for_multi_trajectories"](compute_advantage_for_multi_trajectories, None)
        patched(
            self.data,
            batch.keys,
            adv_estimator=self.config.algorithm.adv_estimator,
            norm_adv_by_std_in_grpo=False,
            config=self.config.algorithm,
        )
        return "batch"


def run_step(
    monkeypatch: pytest.MonkeyPatch, estimator: str, shaping: dict[str, Any], mode: str = "token-sum"
) -> tuple[list[float], Trainer, dict[str, Any]]:
    """Advantage of each row, the trainer and the metrics."""
    trainer, metrics = in_front_of(Trainer)(estimator, mode, shaping), {}

    def kv_batch_get(keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        assert (partition_id, select_fields) == ("train", ["extra_fields"])
        return tu.get_tensordict({"extra_fields": [{"of": key} for key in keys]})

    monkeypatch.setattr("transfer_queue.kv_batch_get", kv_batch_get)
    trainer._compute_advantage(batch_meta(), metrics)
    return trainer.data.batch["advantages"][:, 0].tolist(), trainer, metrics


def test_shaping_sees_each_response_once_and_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    run_step(monkeypatch, "scalerl", {"penalty": {}})
    (seen,) = SEEN
    assert seen.prompt_ids_R == ["a", "a", "a", "b", "b"]
    assert seen.rewards_R.tolist() == [1.0, 1.0, -1.0, 1.0, 1.0]
    assert seen.num_sampled_R.tolist() == [3, 6, 3, 6, 2]
    assert seen.length_R.tolist() == [4, 6, 3, 6, 2]
    assert seen.at_limit_R.tolist() == [False, True, False, True, False]
    assert seen.max_length == MAX_LENGTH
    assert [fields["of"] for fields in seen.extra_fields_R] == ["a_0_1", "a_1_0", "a_2_0", "b_0_0", "b_1_0"]


@pytest.mark.parametrize("estimator", ["scalerl", "grpo", "rloo"])
def test_every_estimator_reads_the_shaped_rewards(monkeypatch: pytest.MonkeyPatch, estimator: str) -> None:
    """Prompt a: 1, 1/2, -1 (mean 1/6); b: 1/2, 1 (mean 3/4). RLOO counts the four rows of a: mean of the others."""
    advantages, trainer, _ = run_step(monkeypatch, estimator, {"penalty": {}})
    if estimator == "rloo":
        expected = [1 - 0.5 / 3, 1 - 0.5 / 3, 0.5 - 1 / 3, -1 - 2.5 / 3, -0.5, 0.5]
    else:
        expected = [5 / 6, 5 / 6, 1 / 3, -7 / 6, -1 / 4, 1 / 4]
    assert advantages == pytest.approx([*expected, 0.0], abs=1e-6)
    scores_B = trainer.data.batch["token_level_scores"].sum(-1).tolist()
    assert scores_B == [reward for _, _, reward in ROWS.values()], "what verl reports is the reward function's"


def test_option_reaches_the_shaping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt b: 0, 1."""
    advantages, _, _ = run_step(monkeypatch, "scalerl", {"penalty": {"size": 1.0}})
    assert advantages[4:6] == pytest.approx([-0.5, 0.5])


@pytest.mark.fault("denominators that count masked, truncated or filtered sequences")
def test_response_left_out_enters_neither_mean_nor_denominator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left: a_0 (1, in 2 + 1 tokens), a_2 (-1, 3 tokens), and b_1 alone, which has no baseline: weight 7 / (1 * 6)."""
    advantages, _, metrics = run_step(monkeypatch, "scalerl", {"leave_out_cut": {}}, mode="prompt-mean")
    assert advantages == pytest.approx([7 / 6, 7 / 6, 0.0, -7 / 6, 0.0, 0.0, 0.0])
    assert metrics["scalerl/data/rows_left_out_sum"] == 2
    assert metrics["scalerl/data/prompts_single_sum"] == 1
    assert metrics["scalerl/data/generated_tokens_sum"] == 20


def test_no_shaping_is_the_default_and_asks_verl_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt a: 1, 1, -1 (mean 1/3); b has no variance."""
    advantages, trainer, metrics = run_step(monkeypatch, "scalerl", {})
    assert advantages == pytest.approx([2 / 3, 2 / 3, 2 / 3, -4 / 3, 0.0, 0.0, 0.0])
    assert trainer.data.batch["token_level_rewards"] is trainer.data.batch["token_level_scores"]
    assert "scalerl/data/rows_left_out_sum" not in metrics and SEEN == []


@pytest.mark.parametrize("mode", [PPOTrainerSync, PPOTrainerColocateAsync, PPOTrainerSeparateAsync])
def test_every_trainer_mode_computes_advantages_where_shaping_applies(mode: type) -> None:
    assert mode._compute_advantage is PPOTrainer._compute_advantage


def shaping_config(changes: dict[str, Any], preset: str = "") -> list[str]:
    return find_problems(changed(preset, {"actor_rollout_ref.rollout.n": 4, **changes}))


def test_shaping_alone_goes_with_estimators_of_verl() -> None:
    name = "algorithm.scalerl.reward_shaping"
    for preset, estimator in (("grpo", "grpo"), ("advantage", "scalerl")):
        assert shaping_config({f"{name}.penalty": {"size": 0.1}}, preset) == [], estimator
    assert shaping_config({f"{name}.leave_out_cut": {}}, "advantage") == []


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"algorithm.scalerl.reward_shaping.penalti": {}}, "algorithm.scalerl.reward_shaping.penalti does not exist"),
        ({"algorithm.scalerl.reward_shaping.penalty.of": 1}, "the options are: size"),
        ({"algorithm.scalerl.reward_shaping": "penalty"}, "must map names to their options"),
        ({"algorithm.scalerl.reward_shaping.leave_out_cut": {}}, "set algorithm.adv_estimator=scalerl"),
        ({"algorithm.scalerl": {"reward_shaping": {}, "adv_norm": "none"}}, "read by the estimator scalerl only"),
        ({"algorithm.reward_shaping.penalty": {}}, "algorithm.reward_shaping has no effect"),
    ],
)
def test_shaping_that_cannot_work_is_refused_at_start(changes: dict[str, Any], match: str) -> None:
    problems = shaping_config(changes, "grpo")
    assert len(problems) == 1 and match in problems[0]
