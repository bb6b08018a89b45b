# SPDX-License-Identifier: Apache-2.0
"""The two trainers: registered by name, refused in unchecked runs; groups started again; rows of a restored queue.

TransferQueue is a dictionary here (the real one needs Ray).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from scalerl_verl.cpu.vllm_alias import install_vllm_alias

install_vllm_alias()

from verl.trainer.ppo.utils import Role  # noqa: E402
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402

from scalerl_verl.columns import MAX_AGE, VERSION, objects_of  # noqa: E402, objects_of
from scalerl_verl.errors import PatchError, StalenessError  # noqa: E402
from scalerl_verl.pipeline import off_policy, trainer  # noqa: E402
from scalerl_verl.pipeline.sending import SendingWorker  # noqa: E402
from scalerl_verl.upstream.activation import ACTIVE_ENV  # noqa: E402
from scalerl_verl.verl import trainer as registered  # noqa: E402, F401

CONFIG = OmegaConf.create({"trainer": {"v1": {"pipeline_rl": {"max_staleness": 2}}}})


class StubQueue:
    """TransferQueue's calls of the trainer."""

    def __init__(self, rows: dict[str, dict], data: Any = None) -> None:
        self.rows, self.data = rows, data

    def kv_list(self, partition: str) -> dict[str, dict]:
        return {partition: self.rows} if self.rows else {}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            del self.rows[key]

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: Any = None) -> Any:
        self.asked = keys
        return self.data


def test_both_modes_are_registered() -> None:
    assert issubclass(TRAINER_REGISTRY["pipeline_rl"], trainer.PPOTrainerPipelineRL)
    assert issubclass(TRAINER_REGISTRY["ppo_off_policy"], off_policy.PPOTrainerOffPolicy)


def test_the_actor_is_a_worker_that_sends_weights_as_generators_hold_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_verl(self: Any) -> None:
        self.role_worker_mapping = {Role.Actor: "verl's worker"}

    monkeypatch.setattr(PPOTrainer, "_init_resource_pool_mgr", of_verl)
    made = object.__new__(trainer.PPOTrainerPipelineRL)
    made._init_resource_pool_mgr()
    (worker,) = made.role_worker_mapping.values()
    assert issubclass(worker.__ray_metadata__.modified_class, SendingWorker)


@pytest.mark.parametrize("mode", ["pipeline_rl", "ppo_off_policy"])
def test_run_that_was_not_checked_is_refused(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ACTIVE_ENV, raising=False)
    with pytest.raises(PatchError, match=f"trainer_mode={mode}"):
        TRAINER_REGISTRY[mode](CONFIG)


def test_off_policy_is_synchronous_to_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl asks for the mode by its name wherever generation and training take turns."""
    monkeypatch.setattr(PPOTrainer, "_build_replay_buffer", lambda self: self.trainer_mode)
    instance = object.__new__(off_policy.PPOTrainerOffPolicy)
    instance.trainer_mode = "ppo_off_policy"
    assert instance._build_replay_buffer() == "sync"


def test_group_starts_again_from_its_stored_prompt_under_a_new_id(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = tu.get_tensordict(
        {
            "raw_prompt": np.array([[{"role": "user", "content": c}] for c in "ab"], dtype=object),
            "index": torch.tensor([4, 9]),
            "uid": np.array(["old-1", "old-2"], dtype=object),
        }
    )
    monkeypatch.setattr(trainer, "tq", StubQueue({}, stored))
    submitted = []
    instance = object.__new__(trainer.PPOTrainerPipelineRL)
    instance.global_steps = 7
    instance._submit_batch_to_rollout = submitted.append
    new = instance._reissue_groups(["old-1", "old-2"])
    (batch,) = submitted
    assert list(batch["uid"]) == new and set(new).isdisjoint({"old-1", "old-2"}) and len(set(new)) == 2
    assert batch["index"].tolist() == [4, 9] and batch["global_steps"] == 7
    assert [prompt[0]["content"] for prompt in objects_of(batch["raw_prompt"])] == ["a", "b"]


@pytest.mark.fault("resuming from a checkpoint skips or repeats prompts")
def test_rows_without_a_prompt_are_dropped_from_a_restored_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch that trained just before the checkpoint is still in the queue that verl saves."""
    rows = {
        "waiting": {"is_prompt": True, "status": "finished"},
        "waiting_0_0": {},
        "trained_0_0": {},
        "trained_1_0": {},
    }
    queue = StubQueue(rows)
    monkeypatch.setattr(trainer, "tq", queue)
    monkeypatch.setattr("transfer_queue.kv_list", queue.kv_list)
    trainer._clear_orphans()
    assert sorted(rows) == ["waiting", "waiting_0_0"]
    rows.clear()
    trainer._clear_orphans()


def test_batch_with_a_token_that_is_too_old_is_refused() -> None:
    instance = object.__new__(trainer.PPOTrainerPipelineRL)
    instance._settings, instance.global_steps = SimpleNamespace(max_staleness=2), 6
    rows = [{"versions": [[3, 1], [4, 1]], "reissues": 1}], [2]
    metrics = instance.measure(*rows)
    assert metrics["scalerl/pipeline/staleness_max"] == 2 and metrics["scalerl/pipeline/requests_reissued_sum"] == 1
    instance.global_steps = 7
    with pytest.raises(StalenessError, match="tokens 2 to 3 versions old"):
        instance.measure(*rows)


def test_workers_are_told_by_what_they_count_ages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version is that of the check above: that of the weights before the step."""
    monkeypatch.setattr(PPOTrainer, "_update_actor", lambda self, batch, metrics: dict(batch.extra_info))
    instance = object.__new__(trainer.PPOTrainerPipelineRL)
    instance._settings, instance.global_steps = SimpleNamespace(max_staleness=2), 6
    told = instance._update_actor(SimpleNamespace(extra_info={"temperature": 1.0}), {})
    assert told == {"temperature": 1.0, VERSION: 5, MAX_AGE: 2}
