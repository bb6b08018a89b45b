# SPDX-License-Identifier: Apache-2.0
"""Length metrics and the truncation alarm in verl's training step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import tensordict_utils as tu
from verl.utils.transferqueue_utils import KVBatchMeta

from scalerl_verl.errors import TruncationError
from scalerl_verl.rollout.interruption import RECORD_KEY, LengthRecord
from scalerl_verl.upstream.activation import ACTIVE_ENV
from scalerl_verl.upstream.verl import training_step as patches

MAX_LENGTH = 8


def record(outcome: str, truncated: bool, thinking: int, answer: int, injected: int = 0) -> dict[str, Any]:
    return LengthRecord(outcome, truncated, thinking, answer, injected, thinking_budget=4).as_dict()


ROWS: dict[str, tuple[float, dict[str, Any] | None]] = {
    # key: reward, record (None: the row's own loop is another one)
    "a_0_0": (1.0, record("natural", False, 3, 2)),
    "a_1_0": (-1.0, record("interrupted", True, 4, 2, 2)),
    "b_0_0": (1.0, record("interrupted", False, 4, 1, 2)),
    "b_1_0": (-1.0, None),
    "pad_0_0": (0.0, None),
}
SAMPLED = [5, 6, 5, 8, 0]
LENGTHS = [5, 8, 7, 8, 1]


class Trainer:
    """Stands for PPOTrainer: its `_compute_advantage` without the TransferQueue around it."""

    def __init__(self, loop: str = "forced_interruption", estimator: str = "scalerl", **alarm: Any) -> None:
        rollout = {"agent": {"default_agent_loop": loop}}
        actor = {"loss_agg_mode": "token-sum", "policy_loss": {"loss_mode": "vanilla"}}
        section: dict[str, Any] = {"truncation_alarm": alarm} if alarm else {}
        self.config = OmegaConf.create(
            {
                "actor_rollout_ref": {"actor": actor, "rollout": rollout},
                "algorithm": {"adv_estimator": estimator, "scalerl": section},
                "data": {"max_response_length": MAX_LENGTH},
            }
        )

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> str:
        mask_BT = torch.arange(MAX_LENGTH)[None, :] < torch.tensor(SAMPLED)[:, None]
        scores_BT = torch.zeros(mask_BT.shape)
        # verl puts the reward on the last token, which may be one of the phrase.
        scores_BT[torch.arange(len(ROWS)), torch.tensor(LENGTHS) - 1] = torch.tensor([row[0] for row in ROWS.values()])
        tensors = {"response_mask": mask_BT.long(), "token_level_scores": scores_BT, "token_level_rewards": scores_BT}
        uid_B = np.array([key.split("_")[0] for key in ROWS], dtype=object)
        builders = {spec.target: spec.build for spec in patches.SPECS}
        builders["compute_advantage_for_multi_trajectories"](compute_advantage_for_multi_trajectories, None)(
            DataProto(batch=TensorDict(tensors, batch_size=len(ROWS)), non_tensor_batch={"uid": uid_B}),
            batch.keys,
            adv_estimator=self.config.algorithm.adv_estimator,
            norm_adv_by_std_in_grpo=False,
            config=self.config.algorithm,
        )
        return "batch"


@pytest.fixture(autouse=True)
def transfer_queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def kv_batch_get(keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        fields = [{} if ROWS[key][1] is None else {RECORD_KEY: ROWS[key][1]} for key in keys]
        return tu.get_tensordict({"extra_fields": fields})

    monkeypatch.setenv(ACTIVE_ENV, "1")
    monkeypatch.setattr("transfer_queue.kv_batch_get", kv_batch_get)
    yield


def run_step(trainer: Trainer) -> dict[str, Any]:
    """Metrics under scalerl/length/ of one step."""
    tags = [
        {"response_len": length, "is_padding": key.startswith("pad")} for key, length in zip(ROWS, LENGTHS, strict=True)
    ]
    batch, metrics = KVBatchMeta(partition_id="train", keys=list(ROWS), tags=tags), {}
    builders = {spec.target: spec.build for spec in patches.SPECS}
    builders["PPOTrainer._compute_advantage"](Trainer._compute_advantage, None)(trainer, batch, metrics)
    prefix = "scalerl/length/"
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


@pytest.mark.parametrize("estimator", ["scalerl", "grpo"])
def test_metrics_of_a_step(estimator: str) -> None:
    """Three responses have a record, one is of another loop and at the limit; padding is none."""
    found = run_step(Trainer(estimator=estimator))
    assert found == {
        "truncated_fraction": 0.5,
        "prompts_truncated_fraction": 1.0,
        "truncated_fraction_prompt_max": 0.5,
        "interrupted_fraction": pytest.approx(2 / 3),
        "natural_close_fraction": pytest.approx(1 / 3),
        "unclosed_fraction": 0.0,
        "no_thinking_fraction": 0.0,
        "thinking_tokens_mean": pytest.approx(11 / 3),
        "answer_tokens_mean": pytest.approx(5 / 3),
        "injected_tokens_sum": 4.0,
        "reward_interrupted_mean": 0.0,
        "reward_natural_mean": 1.0,
        "truncated_window_fraction": 0.5,
        "truncation_alarm_max": 0.0,
    }


def test_another_loop_counts_by_length_and_asks_verl_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer_queue.kv_batch_get", lambda **_: pytest.fail("no record is needed"))
    found = run_step(Trainer(loop="single_turn_agent"))
    assert found["truncated_fraction"] == 0.5 and "interrupted_fraction" not in found


def test_a_run_of_verl_s_own_names_reports_nothing() -> None:
    assert run_step(Trainer(loop="single_turn_agent", estimator="grpo")) == {}
    assert run_step(Trainer(loop="single_turn_agent", estimator="grpo", window_batches=3)) != {}


def test_alarm_warns_once_after_its_window(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(window_batches=2)
    with caplog.at_level(logging.WARNING):
        raised = [run_step(trainer)["truncation_alarm_max"] for _ in range(4)]
    assert raised == [0.0, 1.0, 1.0, 1.0]
    (message,) = [entry.getMessage() for entry in caplog.records if entry.name.startswith("scalerl_verl")]
    assert "50.0%" in message and "data.max_response_length" in message


def test_alarm_stops_the_run_if_asked_to() -> None:
    trainer = Trainer(window_batches=2, on_alarm="stop", fraction=0.4)
    run_step(trainer)
    with pytest.raises(TruncationError, match=r"alarm above 40%"):
        run_step(trainer)
    calm = Trainer(window_batches=1, on_alarm="stop", fraction=0.5)
    assert run_step(calm)["truncation_alarm_max"] == 0.0
