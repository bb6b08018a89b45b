# SPDX-License-Identifier: Apache-2.0
"""Length metrics and the truncation alarm in verl's training step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
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

from scalerl_verl.advantage import length_step
from scalerl_verl.errors import PatchError, TruncationError
from scalerl_verl.interruption.response import RECORD_KEY, LengthRecord
from scalerl_verl.upstream.activation import ACTIVE_ENV
from scalerl_verl.verl import training_step as patches
from tests.steps import in_front_of

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


class StubTrainer:
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


Trainer = in_front_of(StubTrainer)


@pytest.fixture(autouse=True)
def transfer_queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def kv_batch_get(keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        fields = [{} if ROWS[key][1] is None else {RECORD_KEY: ROWS[key][1]} for key in keys]
        return tu.get_tensordict({"extra_fields": fields})

    monkeypatch.setenv(ACTIVE_ENV, "1")
    monkeypatch.setattr("transfer_queue.kv_batch_get", kv_batch_get)
    yield


def run_step(trainer: Any) -> dict[str, Any]:
    """Metrics under scalerl/length/ of one step."""
    tags = [
        {"response_len": length, "is_padding": key.startswith("pad")} for key, length in zip(ROWS, LENGTHS, strict=True)
    ]
    batch, metrics = KVBatchMeta(partition_id="train", keys=list(ROWS), tags=tags), {}
    trainer._compute_advantage(batch, metrics)
    prefix = "scalerl/length/"
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


@pytest.mark.parametrize("estimator", ["scalerl", "grpo"])
def test_metrics_of_a_step(estimator: str) -> None:
    """Three responses have a record, one is of another loop and at the limit; padding is none."""
    found = run_step(Trainer(estimator=estimator))
    assert found == {
        "truncated_fraction": 0.5,
        "clamped_fraction": 0.0,
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
    found = run_step(Trainer(loop="single_turn_agent", estimator="grpo", window_batches=2))
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
    with pytest.raises(TruncationError, match=r"alarm above 40.0%"):
        run_step(trainer)
    calm = Trainer(window_batches=1, on_alarm="stop", fraction=0.5)
    assert run_step(calm)["truncation_alarm_max"] == 0.0


def test_window_survives_a_checkpoint(tmp_path: Path) -> None:
    """A resumed run must not have to be cut for a whole window again before the alarm is raised."""
    first = Trainer(window_batches=3, on_alarm="stop", fraction=0.4)
    run_step(first)
    run_step(first)
    length_step.save_alarm(first.scalerl.alarm, first.config, str(tmp_path))
    resumed = Trainer(window_batches=3, on_alarm="stop", fraction=0.4)
    length_step.restore_alarm(resumed.scalerl.alarm, resumed.config, str(tmp_path))
    with pytest.raises(TruncationError, match="last 3 batches"):
        run_step(resumed)
    fresh = Trainer(window_batches=3, on_alarm="stop", fraction=0.4)
    length_step.restore_alarm(fresh.scalerl.alarm, fresh.config, None)
    length_step.restore_alarm(fresh.scalerl.alarm, fresh.config, str(tmp_path / "saved before there was an alarm"))
    assert run_step(fresh)["truncation_alarm_max"] == 0.0
    (tmp_path / length_step.STATE_FILE).write_text("{")
    with pytest.raises(ValueError, match=f"{length_step.STATE_FILE}.*delete it to start with an empty window"):
        length_step.restore_alarm(fresh.scalerl.alarm, fresh.config, str(tmp_path))


def test_a_run_of_verl_s_own_names_saves_no_window(tmp_path: Path) -> None:
    trainer = Trainer(loop="single_turn_agent", estimator="grpo")
    length_step.save_alarm(trainer.scalerl.alarm, trainer.config, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


class Buffer:
    """Stands for verl's ReplayBuffer: the rows in two batches, the outputs of a session in any order."""

    def __init__(self) -> None:
        self.parts = [["b_1_0", "b_0_0"], ["a_1_0", "a_0_0"]]

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        keys = self.parts.pop(0)
        lengths = dict(zip(ROWS, LENGTHS, strict=True))
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=[{"response_len": lengths[k]} for k in keys]), {}


def test_metrics_of_a_validation_of_several_batches() -> None:
    trainer = Trainer()
    trainer.replay_buffer = Buffer()
    with length_step.watch_validation(trainer.config, trainer.replay_buffer) as lengths:
        assert lengths is not None
        for _ in range(2):
            trainer.replay_buffer.sample(global_steps=0, partition_id="val", batch_size=1)
        lengths.note_rewards([-1.0, 1.0, -1.0, 1.0])
        found = lengths.metrics()
    # As of the same rows in training, without the alarm.
    expected = {f"scalerl/length/val/{name}": value for name, value in run_step(Trainer()).items()}
    alarm = ("scalerl/length/val/truncated_window_fraction", "scalerl/length/val/truncation_alarm_max")
    assert found == {name: pytest.approx(value) for name, value in expected.items() if name not in alarm}
    assert set(vars(trainer.replay_buffer)) == {"parts"}, "the buffer is verl's own again"


def test_validation_that_scored_other_responses_than_it_sampled_is_an_error() -> None:
    trainer = Trainer()
    trainer.replay_buffer = Buffer()
    with length_step.watch_validation(trainer.config, trainer.replay_buffer) as lengths:
        trainer.replay_buffer.sample(global_steps=0, partition_id="val", batch_size=1)
        with pytest.raises(PatchError, match="sampled 2 responses and scored none"):
            lengths.metrics()
        lengths.note_rewards([1.0])
        with pytest.raises(PatchError, match="sampled 2 responses and scored 1"):
            lengths.metrics()


def test_validation_of_a_run_of_verl_s_own_names_is_not_looked_at() -> None:
    trainer = Trainer(loop="single_turn_agent", estimator="grpo")
    trainer.replay_buffer = Buffer()
    with length_step.watch_validation(trainer.config, trainer.replay_buffer) as lengths:
        assert lengths is None
