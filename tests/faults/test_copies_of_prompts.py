# SPDX-License-Identifier: Apache-2.0
"""Rows of one prompt that stand several times in the data: one prompt, in the curriculum as in the validation.

Data is read by verl's own class; its agent loops, which take Ray, are a stub.
"""

from __future__ import annotations

import copy
import logging
import math
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch.utils.data import SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_sampler
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

from scalerl_verl.curriculum import NoPositiveResampling, ResamplingRules
from scalerl_verl.curriculum.prompt_ids import count_copies, prompt_id
from scalerl_verl.curriculum.verl import with_sampler
from tests.steps import in_front_of

CONFIG = OmegaConf.create({"train_batch_size": 2, "shuffle": False, "filter_overlong_prompts": False})


def make_row(index: int, problem: int, **changes: Any) -> dict[str, Any]:
    row = {
        "data_source": "tests/sum",
        "prompt": [{"role": "user", "content": f"{problem}+1"}],
        "reward_model": {"style": "rule", "ground_truth": str(problem + 1)},
        "extra_info": {"split": "test", "index": index},
    }
    return {**row, **changes}


def read_data(folder: Path, rows: list[dict[str, Any]]) -> Any:
    path = folder / "rows.parquet"
    pandas.DataFrame(rows).to_parquet(path)
    return RLHFDataset(data_files=str(path), tokenizer=None, config=CONFIG)


class StubManager:
    """Stands for verl's AgentLoopManager: two responses to each row it is given, but for ``failing``."""

    def __init__(self) -> None:
        self.failing: set[int] = set()
        self.sampled: list[tuple[str, float]] = []

    def generate_sequences(self, rows: Any) -> None:
        for uid, messages, info in zip(rows["uid"], rows["raw_prompt"], rows["extra_info"], strict=True):
            if int(info["index"]) not in self.failing:
                self.sampled += 2 * [(str(uid), 1.0 if messages[0]["content"] < "2" else -1.0)]


class StubTrainer:
    """Stands for verl's PPOTrainer: a validation in batches of three rows; responses pass by the problem."""

    total_training_steps = 10

    def __init__(self, config: Any, dataset: Any) -> None:
        self.config, self.val_dataset, self.global_steps = config, dataset, 0
        self.agent_loop_manager, self.replay_buffer = StubManager(), None

    def _load_checkpoint(self) -> None:
        pass

    def _validate(self) -> dict[str, float]:
        manager, asked = self.agent_loop_manager, {}
        manager.sampled.clear()
        for start in range(0, len(self.val_dataset), 3):
            rows = [self.val_dataset[row] for row in range(start, min(start + 3, len(self.val_dataset)))]
            batch = collate_fn(rows)
            batch["uid"] = np.array([str(uuid.uuid4()) for _ in rows], dtype=object)
            asked.update({("tests/sum", uid): 2 for uid in batch["uid"]})
            manager.generate_sequences(tu.get_tensordict(batch))
        uids, rewards = [uid for uid, _ in manager.sampled], [reward for _, reward in manager.sampled]
        sources = ["tests/sum"] * len(uids)
        return self._val_metrics_update(sources, uids, {"reward": rewards}, [], expected_acc_counts=asked)

    def _val_metrics_update(
        self, sources: Any, sample_uids: Any, infos: Any, turns: Any, expected_acc_counts: Any
    ) -> dict[str, float]:
        return {}


@pytest.fixture
def validate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Validate rows through our steps; returns the metrics."""
    monkeypatch.setattr("scalerl_verl.advantage.length_step.watches_lengths", lambda config: False)

    def run(dataset: Any, failing: Iterable[int] = ()) -> dict[str, float]:
        trainer = {"default_local_dir": str(tmp_path), "nnodes": 1, "n_gpus_per_node": 1, "resume_mode": "auto"}
        algorithm = {"adv_estimator": "scalerl"}
        config = OmegaConf.create({"trainer": trainer, "algorithm": algorithm, "data": CONFIG})
        stub = in_front_of(StubTrainer, ledger=True)(config, dataset)
        stub.agent_loop_manager.failing.update(failing)
        stub._load_checkpoint()
        assert stub.scalerl.ledger is not None
        stub._validate()
        return stub._validate()

    return run


def test_standard_error_of_a_validation_is_over_prompts_and_not_over_rows(
    tmp_path: Path, validate: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Four problems, of which two pass, eight times each: .5 with an error of .29, which 32 prompts would make .09."""
    rows = [make_row(copied * 4 + problem, problem) for copied in range(8) for problem in range(4)]
    metrics = validate(read_data(tmp_path, rows))
    assert metrics["scalerl/validation/num_prompts"] == 4 and metrics["scalerl/validation/num_generations"] == 64
    assert metrics["scalerl/validation/pass_rate"] == 0.5
    assert metrics["scalerl/validation/stderr"] == pytest.approx(math.sqrt(1 / 3) / 2)
    assert "data.val_files: 28 of 32 rows are copies of 4 prompts" in caplog.text


def test_prompts_without_copies_are_counted_as_before(tmp_path: Path, validate: Any, caplog: Any) -> None:
    metrics = validate(read_data(tmp_path, [make_row(problem, problem) for problem in range(4)]))
    assert metrics["scalerl/validation/num_prompts"] == 4
    assert "copies" not in caplog.text


def test_validation_data_that_cannot_be_marked_is_validated_and_said(
    tmp_path: Path, validate: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Rows(list):
        dataframe = None

    data = read_data(tmp_path, [make_row(row, row % 2) for row in range(4)])
    metrics = validate(Rows(data[row] for row in range(4)))
    assert metrics["scalerl/validation/num_prompts"] == 4
    assert "takes each row of the validation data for a prompt of its own" in caplog.text


def test_copy_without_a_response_counts_as_generations_of_its_prompt(tmp_path: Path, validate: Any) -> None:
    """Two of four copies of a problem fail as a whole: the prompt passed in half of its generations."""
    metrics = validate(read_data(tmp_path, [make_row(row, row % 2) for row in range(8)]), failing=(0, 2))
    assert metrics["scalerl/validation/num_prompts"] == 2 and metrics["scalerl/validation/num_generations"] == 16
    assert metrics["scalerl/validation/pass_rate"] == 0.75


def test_copies_in_the_training_data_are_said_at_start_with_and_without_the_curriculum(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    section = {"class_path": "scalerl_verl.curriculum.NoPositiveResampling", "min_prompts": 1}
    for config in (CONFIG, OmegaConf.merge(CONFIG, {"sampler": section})):
        caplog.clear()
        dataset = read_data(tmp_path, [make_row(row, row // 2) for row in range(5)])
        with_sampler(StatefulDataLoader(dataset, sampler=create_rl_sampler(config, dataset)), config)
        assert "data.train_files: 2 of 5 rows are copies of 2 prompts" in caplog.text


@pytest.mark.works_with("vision", "curriculum")
def test_same_prompt_with_another_answer_source_or_image_is_no_copy(tmp_path: Path) -> None:
    rows = [
        make_row(0, 1),
        make_row(1, 1, reward_model={"style": "rule", "ground_truth": "3"}),
        make_row(2, 1, data_source="tests/other"),
        make_row(3, 1, images=[{"bytes": b"one", "path": "a.png"}]),
        make_row(4, 1, images=[{"bytes": b"two", "path": "a.png"}]),
    ]
    ids = [prompt_id(row, media_keys=("images",)) for row in rows]
    assert count_copies(ids) == (0, 0)
    renamed = make_row(5, 1, images=[{"bytes": b"one", "path": "b.png"}])
    assert prompt_id(renamed, media_keys=("images",)) == ids[3]
    # Files of other columns, read together, fill in what the others have.
    empty = {"index": 9, "tools_kwargs": {"judge": {"create_kwargs": {"ground_truth": None}}}}
    assert prompt_id(make_row(6, 1, extra_info=empty, agent_name=None)) == prompt_id(rows[0])


def make_sampler(num_prompts: int, copies: int, **rules: Any) -> NoPositiveResampling:
    ids = [f"p{row % num_prompts}" for row in range(num_prompts * copies)]
    return NoPositiveResampling(SequentialSampler(range(len(ids))), ids, ResamplingRules(**rules))


def test_mastered_prompt_is_not_drawn_again_within_a_pass_over_its_copies() -> None:
    """The first pass over data with every prompt a hundred times outlasts the run: nothing was ever dropped."""
    sampler = make_sampler(4, 100)
    draws = iter(sampler)
    assert [next(draws) for _ in range(4)] == [0, 1, 2, 3]
    sampler.history.record("p0", 1, 4, 4)
    sampler.history.record("p2", 1, 4, 4)
    assert [next(draws) % 4 for _ in range(6)] == [1, 3, 1, 3, 1, 3]
    assert (sampler.epoch, sampler.num_dropped, sampler.num_remaining) == (4, 2, 2)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(2, 5), st.integers(1, 4), st.integers(1, 40), st.lists(st.tuples(st.integers(0, 39), st.integers(0, 4)))
)
def test_epochs_have_as_many_rows_as_prompts_and_survive_a_checkpoint(
    num_prompts: int, copies: int, stop: int, masteries: list[tuple[int, int]]
) -> None:
    """Whatever is mastered when: drawn in one go, or stopped after some row, saved and continued."""

    def play(stop: int | None) -> list[tuple[int, int, int]]:
        sampler = make_sampler(num_prompts, copies)
        draws, found = iter(sampler), []
        for number in range(40):
            try:
                row = next(draws)
            except StopIteration:
                draws = iter(sampler)
                row = next(draws)
            found.append((row, sampler.epoch, sampler.num_remaining))
            for _, prompt in (pair for pair in masteries if pair[0] == number):
                sampler.history.record(f"p{prompt}", number, 4, 4)
            if number == stop:
                state, place = copy.deepcopy(sampler.state_dict()), draws.state_dict()
                sampler = make_sampler(num_prompts, copies)
                sampler.load_state_dict(state)
                draws = iter(sampler)
                draws.load_state_dict(place)
        return found

    whole = play(None)
    assert play(stop) == whole
    for epoch in range(1, whole[-1][1]):
        drawn = [size for _, number, size in whole if number == epoch]
        assert len(drawn) == drawn[0]


def test_checkpoint_that_knows_prompts_by_their_row_is_refused_with_what_to_do() -> None:
    old, new = make_sampler(4, 1), make_sampler(4, 1)
    old.history.record("17", 1, 4, 4)
    state = copy.deepcopy(old.state_dict()) | {"data": "of another kind"}
    del state["num_drawn"]
    with pytest.raises(ValueError, match=r"knows 1 prompts, and the training data has none.*delete data\.pt"):
        new.load_state_dict(state)


def test_checkpoint_from_before_copies_were_looked_at_still_loads(caplog: pytest.LogCaptureFixture) -> None:
    old, new = make_sampler(4, 2), make_sampler(4, 2)
    next(iter(old))
    old.history.record("p1", 1, 4, 4)
    state = copy.deepcopy(old.state_dict())
    del state["num_drawn"]
    with caplog.at_level(logging.WARNING):
        new.load_state_dict(state)
    assert new.epoch == 1 and new.history.get("p1") is not None and not caplog.text
