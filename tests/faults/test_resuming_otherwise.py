# SPDX-License-Identifier: Apache-2.0
"""A pipeline run resumed with another k, batch or group size, and prompts that ask for a group size of their own.

Replay buffer, admission rule and trainer methods are real, verl's included. TransferQueue is a dictionary (the real one
needs Ray), and the generators are a draw of which group ends next.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from scalerl_verl.cpu.vllm_alias import install_vllm_alias

install_vllm_alias()

from verl.trainer.ppo.v1 import replay_buffer as verl_buffer  # noqa: E402
from verl.trainer.ppo.v1 import trainer_base as verl_trainer  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402

from scalerl_verl.columns import ROLLOUT_N, objects_of  # noqa: E402
from scalerl_verl.errors import ScaleRLConfigError  # noqa: E402
from scalerl_verl.pipeline import buffer as our_buffer  # noqa: E402
from scalerl_verl.pipeline import mode_change  # noqa: E402
from scalerl_verl.pipeline import trainer as our_trainer  # noqa: E402
from scalerl_verl.pipeline.admission import AdmissionRule  # noqa: E402
from scalerl_verl.pipeline.failures import WAITING_TAG  # noqa: E402
from scalerl_verl.pipeline.groups import GroupWatch  # noqa: E402

ENDLESS = 10_000


class StubQueue:
    """TransferQueue as two dictionaries: tags and fields of each key."""

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, Any]] = {}
        self.fields: dict[str, dict[str, Any]] = {}

    def kv_list(self, partition: str | None = None) -> dict[str, dict]:
        return {"train": copy.deepcopy(self.tags)} if self.tags else {}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.tags.pop(key, None)
            self.fields.pop(key, None)

    def kv_batch_put(self, keys: list[str], partition_id: str, tags: Any = None, fields: Any = None) -> None:
        for row, key in enumerate(keys):
            self.tags.setdefault(key, {}).update(tags[row])
            if fields is not None:
                self.fields[key] = {name: objects_of(fields[name])[row] for name in fields.keys()}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: Any = None) -> Any:
        rows = [self.fields[key] for key in keys]
        names = {name for row in rows for name in row}
        return tu.get_tensordict({name: as_column([row[name] for row in rows]) for name in names})


def as_column(values: list[Any]) -> Any:
    if isinstance(values[0], int):
        return torch.tensor(values)
    return np.array([*values, None], dtype=object)[:-1]


class Run:
    """One run over its resumptions; ``sizes`` are the values of verl's column, in turn."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, k: int, batch: int, n: int, sizes: tuple[int, ...] = ()
    ) -> None:
        self.monkeypatch, self.random, self.sizes = monkeypatch, random.Random(k + 10 * batch), sizes
        self.queue, self.num_drawn, self.step = StubQueue(), 0, 0
        self.trained: list[int] = []
        self.is_of_another_mode = False
        self.start(k, batch, n)

    def start(self, k: int, batch: int, n: int, num_steps: int = ENDLESS) -> None:
        """A new process over the queue as it is."""
        self.k, self.batch, self.n = k, batch, n
        for module in (verl_buffer, verl_trainer, our_buffer, our_trainer):
            self.monkeypatch.setattr(module, "tq", self.queue)
        self.monkeypatch.setattr("transfer_queue.kv_list", self.queue.kv_list)
        trainer: Any = object.__new__(our_trainer.PPOTrainerPipelineRL)
        trainer.trainer_mode, trainer.global_steps, trainer._fetch_one_gen_batch = "pipeline_rl", self.step, self.draw
        trainer.config = SimpleNamespace(data=SimpleNamespace(train_batch_size=batch, get=lambda key, default=None: 1))
        trainer.agent_loop_manager = SimpleNamespace(generate_sequences=self.generate)
        self.under_way: set[str] = set()
        trainer.replay_buffer = our_buffer.PipelineReplayBuffer(
            AdmissionRule(batch, k), group_size=n, watch=GroupWatch(3, 1e9), admit=trainer._add_prompts_to_generate,
            reissue=trainer._reissue_groups, check_generators=lambda: None, num_steps=lambda: num_steps,
            trainer_mode="pipeline_rl", trainer_config={}, max_off_policy_threshold=None,
            max_off_policy_strategy="wait", sampler_kwargs={},
        )  # fmt: skip
        trainer.replay_buffer._wait_for_next_poll = self.wait
        our_trainer._clear_orphans()
        trainer.global_steps += 1
        trainer._reissue_inflight_prompts()
        self.trainer = trainer

    def draw(self) -> Any:
        index = self.num_drawn
        self.num_drawn += 1
        columns = {"raw_prompt": as_column([[{"content": str(index)}]]), "index": torch.tensor([index])}
        if self.sizes:
            columns[ROLLOUT_N] = as_column([np.int64(self.sizes[index % len(self.sizes)])])
        return tu.get_tensordict({**columns, "uid": as_column([f"u{index}r{self.random.getrandbits(32)}"])})

    def generate(self, batch: Any) -> None:
        for uid in batch["uid"]:
            assert uid not in self.under_way
            self.under_way.add(uid)
            self.queue.tags[uid]["status"] = "running"

    def end_one(self) -> None:
        uid = self.random.choice(sorted(self.under_way))
        self.under_way.remove(uid)
        size = int(self.queue.fields[uid].get(ROLLOUT_N, self.n))
        for session in range(size):
            self.queue.kv_batch_put(
                [f"{uid}_{session}_0"], "train", [{"started": self.queue.tags[uid]["global_steps"] - 1}]
            )
            extra = {} if self.is_of_another_mode else {"versions": []}
            self.queue.fields[f"{uid}_{session}_0"] = {
                "index": self.queue.fields[uid]["index"], "extra_fields": extra,
            }  # fmt: skip
        self.queue.tags[uid]["status"] = "finished"

    def wait(self, partition: str, last: float) -> float:
        assert self.under_way, "the trainer waits for nothing"
        self.end_one()
        return last

    def train(self, num_steps: int, finish: float = 0.5) -> None:
        """Training steps, each with a check of its batch; ``finish``: of the groups under way end meanwhile."""
        for _ in range(num_steps):
            buffer, version = self.trainer.replay_buffer, self.trainer.global_steps - 1
            buffer.top_up(self.trainer.global_steps)
            batch, _ = buffer.sample(self.trainer.global_steps, "train", self.batch)
            responses = Counter(self.queue.fields[key]["index"] for key in batch.keys)
            assert len(responses) == self.batch
            for index, size in responses.items():
                assert size == (self.sizes[index % len(self.sizes)] if self.sizes else self.n)
            assert all(version - self.k <= tag["started"] <= version for tag in batch.tags), "older than k"
            self.trained += responses
            self.queue.kv_clear(batch.keys, "train")
            for _ in range(round(finish * len(self.under_way))):
                self.end_one()
            self.step = self.trainer.global_steps
            self.trainer.global_steps += 1

    def assert_nothing_lost(self) -> None:
        waiting = [fields["index"] for uid, fields in self.queue.fields.items() if "_" not in uid]
        assert sorted(self.trained + waiting) == list(range(self.num_drawn)), "each prompt once"


CHANGES: dict[str, dict[str, int]] = {
    "nothing": {}, "smaller k": {"k": 2}, "on-policy": {"k": 0}, "larger k": {"k": 16}, "smaller batch": {"batch": 2},
    "larger batch": {"batch": 8}, "fewer responses": {"n": 1}, "more responses": {"n": 4},
    "everything": {"k": 1, "batch": 3, "n": 3},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("finish", [0.0, 0.3, 1.0])
def test_run_goes_on_with_other_settings_and_no_prompt_is_lost(
    change: dict[str, int], finish: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: what the old settings admitted breaks the rule of the new ones, which ends the run."""
    run = Run(monkeypatch, k=8, batch=4, n=2)
    run.train(5, finish)
    num_groups = sum(tag.get("is_prompt", False) for tag in run.queue.tags.values())
    num_finished = sum(tag.get("status") == "finished" for tag in run.queue.tags.values())
    run.start(**{"k": 8, "batch": 4, "n": 2, **change})
    run.train(1, finish)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"[scalerl_verl] resumed: of {num_groups} prompt groups in the checkpoint ")
    if not change or change == CHANGES["larger k"]:
        assert f"{num_finished} train as they are" in line and "too old" not in line
    if "n" in change and num_finished:
        assert f"have another number of responses than actor_rollout_ref.rollout.n={change['n']}" in line
    if change in ({"k": 2}, {"k": 0}, {"batch": 2}) and finish == 1.0:
        settings = f"max_staleness={run.k} and data.train_batch_size={run.batch}"
        assert f"are too old for trainer.v1.pipeline_rl.{settings}" in line
    run.train(20, finish)
    run.assert_nothing_lost()


def run_with_prompts_that_wait(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Resumed with a smaller k and batch, which have no room for what the checkpoint holds."""
    run = Run(monkeypatch, k=8, batch=4, n=1)
    run.train(3)
    run.start(k=0, batch=2, n=1)
    run.train(2)
    assert len(run.trainer.replay_buffer._find_waiting()) > 20
    return run


def test_prompts_without_room_wait_through_another_resumption_and_train_before_fresh_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_with_prompts_that_wait(monkeypatch)
    run.start(k=1, batch=3, n=1)
    num_drawn = run.num_drawn
    run.train((num_drawn - len(run.trained)) // 3)
    assert run.num_drawn <= num_drawn + 6 and set(run.trained) >= set(range(num_drawn - 6))
    run.assert_nothing_lost()


def test_groups_that_another_mode_finished_are_generated_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: a checkpoint of separate_async that is resumed in pipeline_rl dies at its first batch, every time."""
    run = Run(monkeypatch, k=4, batch=4, n=2)
    run.is_of_another_mode = True
    run.train(3)
    num_finished = sum(tag.get("status") == "finished" for tag in run.queue.tags.values())
    run.start(k=4, batch=4, n=2)
    run.is_of_another_mode = False
    run.train(1)
    assert num_finished
    said = f"{num_finished} have no record of their weights' versions, as in other trainer modes"
    assert said in capsys.readouterr().err
    run.train(10)
    run.assert_nothing_lost()


def load_in(mode: str, run: Run, folder: Any) -> Any:
    """verl's trainer base in another mode, after it loaded the checkpoint of a run."""
    run.monkeypatch.setattr(mode_change, "tq", run.queue)
    trainer: Any = object.__new__(our_trainer.PPOTrainerPipelineRL)
    trainer.config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": mode}}})
    trainer.trainer_mode = "sync" if mode in ("sync", "ppo_off_policy") else mode
    trainer.global_steps, trainer._restored_tq_prompt_count = run.step + 1, verl_trainer._count_tq_prompt_groups()
    trainer.agent_loop_manager = SimpleNamespace(generate_sequences=run.generate)
    mode_change.hand_over_queue(trainer, str(folder))
    return trainer


def test_prompts_that_wait_are_started_by_the_mode_that_resumes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Fault: they stay in the queue of verl's asynchronous modes for ever, and no batch has them."""
    run = run_with_prompts_that_wait(monkeypatch)
    run.under_way.clear()
    trainer = load_in("separate_async", run, tmp_path)
    prompts = [uid for uid in run.queue.tags if "_" not in uid]
    assert trainer._restored_tq_prompt_count == len(prompts)
    verl_trainer.PPOTrainer._reissue_inflight_prompts(trainer)
    finished = {uid for uid in prompts if run.queue.tags[uid]["status"] == "finished"}
    assert run.under_way == set(prompts) - finished
    for uid in prompts:
        assert run.queue.tags[uid]["is_prompt"] and not run.queue.tags[uid].get(WAITING_TAG, False)


@pytest.mark.parametrize("mode", ["sync", "ppo_off_policy"])
def test_mode_that_reads_no_queue_says_that_its_prompts_are_left_out(
    mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(monkeypatch, k=1, batch=1, n=1)
    load_in(mode, run, tmp_path)
    assert "were drawn" not in caplog.text
    (tmp_path / "transfer_queue").mkdir()
    load_in(mode, run, tmp_path)
    assert f"were drawn and not trained, which trainer.v1.trainer_mode={mode} does not read" in caplog.text


@pytest.mark.parametrize("seed", range(20))
def test_any_settings_may_follow_any(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    sizes = draw.choice([(), (2, 1, 3)])

    def settings() -> dict[str, int]:
        return {"k": draw.choice([0, 1, 4]), "batch": draw.choice([1, 2, 5]), "n": draw.choice([1, 2])}

    run = Run(monkeypatch, **settings(), sizes=sizes)
    for _ in range(5):
        run.train(draw.randint(1, 5), draw.random())
        run.start(**settings())
    run.train(3)
    run.assert_nothing_lost()


@pytest.mark.parametrize("sizes", [(2, 4), (4, 6, 1)])
def test_prompts_that_ask_for_another_number_of_responses_train(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: groups of fewer than rollout.n responses count as incomplete, are generated again and given up."""
    run = Run(monkeypatch, k=1, batch=4, n=4, sizes=sizes)
    run.train(4)
    run.start(k=1, batch=4, n=2)
    run.train(4)
    assert not [message for message in caplog.messages if "started again" in message]
    run.assert_nothing_lost()
    assert len(run.trainer.replay_buffer._sizes) <= 8, "sizes of trained groups are forgotten"


def test_group_that_lacks_responses_by_its_own_size_is_generated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, k=0, batch=1, n=2, sizes=(4,))
    run.trainer.replay_buffer.top_up(1)
    (uid,) = run.under_way
    run.end_one()
    run.queue.kv_clear([f"{uid}_3_0", f"{uid}_2_0"], "train")  # two responses are there, as rollout.n says
    run.train(1)
    assert run.trained == [0] and run.num_drawn == 1


@pytest.mark.parametrize("size", [0, 2.0, None, "2"])
def test_column_that_holds_no_number_of_responses_is_named(size: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = tu.get_tensordict({ROLLOUT_N: as_column([np.array(size).item()]) if size != 0 else torch.tensor([0])})
    with pytest.raises(ScaleRLConfigError, match=rf"column __rollout_n__ holds {size!r}.* whole numbers from 1"):
        our_trainer.read_group_sizes(batch, ["u"])
