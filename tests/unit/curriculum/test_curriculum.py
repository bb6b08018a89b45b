# SPDX-License-Identifier: Apache-2.0
"""No-positive-resampling as verl meets it: its data set class, its loader, the training step, config and file."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from torchdata.stateful_dataloader import StatefulDataLoader
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo.utils import create_rl_sampler
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

from scalerl_verl.advantage.step import AdvantageStep, advantage_step, fold_row_weights
from scalerl_verl.curriculum import (
    DroppedPrompt,
    EpochChange,
    NoPositiveResampling,
    ResamplingRules,
)
from scalerl_verl.curriculum.drop_list import DropList
from scalerl_verl.curriculum.prompt_ids import COLUMN, label_dataset, prompt_id
from scalerl_verl.curriculum.settings import RULES, read_rules
from scalerl_verl.curriculum.verl import (
    add_visits,
    find_sampler,
    record_visits,
    tally_rejected,
    with_sampler,
    wrap_sampler,
)
from scalerl_verl.errors import PatchError, ScaleRLConfigError
from scalerl_verl.json_lines import read_records
from scalerl_verl.names import SAMPLER_CLASS
from scalerl_verl.names.rules import broken
from tests.steps import in_front_of


def make_row(index: int, **changes: Any) -> dict[str, Any]:
    row = {
        "data_source": "tests/sum",
        "prompt": [{"role": "user", "content": f"{index}+1"}],
        "reward_model": {"style": "rule", "ground_truth": str(index + 1)},
        "extra_info": {"split": "train", "index": index},
    }
    return {**row, **changes}


def make_data(folder: Path, rows: list[dict[str, Any]], **data: Any) -> tuple[Any, Any]:
    """verl's training data from a file, and the config section."""
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    options = {"train_batch_size": 2, "shuffle": False, "filter_overlong_prompts": False, **data}
    config = OmegaConf.create({"data": options}).data
    return RLHFDataset(data_files=str(folder / "train.parquet"), tokenizer=None, config=config), config


ALGORITHM = {
    "algorithm": {"adv_estimator": "grpo"},
    "actor_rollout_ref": {"actor": {"loss_agg_mode": "token-mean", "policy_loss": {"loss_mode": "vanilla"}}},
}
"""The keys of verl's config that the training step reads; none of our algorithm's names."""
SAMPLER = {"class_path": SAMPLER_CLASS, "min_prompts": 2}


def test_id_depends_on_content_only() -> None:
    row = make_row(1)
    same = {
        "extra_info": {"index": 99},
        "reward_model": {"ground_truth": "2", "style": "other", "hint": None},
        "prompt": [{"content": "1+1", "role": "user", "tool_calls": None}],
        "data_source": "tests/sum",
    }
    assert prompt_id(row) == prompt_id(same)
    assert len(prompt_id(row)) == 32 and int(prompt_id(row), 16) >= 0


@pytest.mark.parametrize(
    "changes",
    [
        {"data_source": "tests/other"},
        {"prompt": [{"role": "user", "content": "1+1 "}]},
        {"prompt": [{"role": "system", "content": "1+1"}]},
        {"reward_model": {"style": "rule", "ground_truth": "3"}},
        {"reward_model": {"style": "rule", "ground_truth": 2}},
        {"images": [{"bytes": b"one"}]},
        {"images": [{"bytes": b"one", "path": "1.png"}, {"bytes": b"two", "path": "1.png"}]},
        {"images": ["one.png"]},
        {"agent_name": "tool_agent"},
        {"extra_info": {"index": 1, "tools_kwargs": {"judge": {"create_kwargs": {"ground_truth": "3"}}}}},
        {"extra_info": {"index": 1, "interaction_kwargs": {"name": "gsm8k"}}},
    ],
)
def test_id_differs_with_the_content(changes: dict[str, Any]) -> None:
    assert prompt_id(make_row(1, **changes), media_keys=("images",)) != prompt_id(make_row(1), media_keys=("images",))


def test_id_is_the_same_in_every_process_and_version() -> None:
    """Checkpoints hold it: if this fails, histories of earlier runs are lost."""
    assert prompt_id(make_row(1)) == "23f1745150d794457a9bf76c081a94b8"
    row = make_row(1, prompt="plain \u00e9 text", reward_model=None)
    assert prompt_id(row) == prompt_id(dict(reversed(row.items())))


def test_rows_of_verls_data_set_carry_the_id_through_the_loader(tmp_path: Path) -> None:
    rows = [make_row(index) for index in (3, 1, 2, 1)]
    dataset, config = make_data(tmp_path, rows)
    ids = label_dataset(dataset, config)
    assert ids == [prompt_id(row) for row in rows]
    assert ids[1] == ids[3] and len(set(ids)) == 3
    loader = StatefulDataLoader(dataset, batch_size=2, collate_fn=collate_fn)
    batches = [tu.get_tensordict(batch) for batch in loader]
    assert [str(value) for batch in batches for value in batch[COLUMN]] == ids


def test_ids_follow_the_rows_that_are_left_after_filtering(tmp_path: Path) -> None:
    dataset, config = make_data(tmp_path, [make_row(index) for index in range(6)])
    dataset.dataframe = dataset.dataframe.filter(lambda row: row["extra_info"]["index"] % 2 == 1)
    assert label_dataset(dataset, config) == [prompt_id(make_row(index)) for index in (1, 3, 5)]


class PickyDataset:
    """Passes on one column only."""

    def __init__(self) -> None:
        self.dataframe = datasets.Dataset.from_list([make_row(1)])

    def __getitem__(self, item: int) -> dict[str, Any]:
        return {"prompt": self.dataframe[item]["prompt"]}


def test_data_whose_prompts_cannot_be_marked_is_refused(tmp_path: Path) -> None:
    options = {"sampler": SAMPLER}
    table = SimpleNamespace(dataframe=pandas.DataFrame([make_row(1)]))
    with pytest.raises(ValueError, match=r"derive data\.custom_cls from RLHFDataset.*, or delete .*~data\.sampler"):
        wrap_sampler(None, options, table)
    with pytest.raises(ValueError, match=r"does not pass on all columns.*pass it on, or delete .*~data\.sampler"):
        wrap_sampler(None, options, PickyDataset())
    dataset, config = make_data(tmp_path, [make_row(1, **{COLUMN: "x"})], **options)
    with pytest.raises(ValueError, match=f"has a column '{COLUMN}'.*rename it"):
        wrap_sampler(None, config, dataset)
    dataset, config = make_data(tmp_path, [make_row(1)], prompt_key="question", **options)
    with pytest.raises(ValueError, match=r"data\.prompt_key=question is no column"):
        wrap_sampler(None, config, dataset)


def test_sampler_wraps_verls_own_only_when_named(tmp_path: Path) -> None:
    dataset, config = make_data(tmp_path, [make_row(index) for index in range(4)], shuffle=True, seed=1)
    options = {"batch_size": 2, "num_workers": 0, "drop_last": True, "collate_fn": collate_fn}

    def of_verl() -> StatefulDataLoader:
        return StatefulDataLoader(dataset, sampler=create_rl_sampler(config, dataset), **options)

    for section in (None, {"class_path": "mine.Sampler"}):
        config.sampler = section
        given = of_verl()
        assert with_sampler(given, config) is given
        assert COLUMN not in dataset.dataframe.column_names
    config.sampler = {**SAMPLER, "threshold": 0.5}
    state = torch.get_rng_state()
    loader = with_sampler(of_verl(), config)
    assert torch.equal(state, torch.get_rng_state()), "what is drawn later is that of a run without it"
    sampler = loader.sampler
    assert isinstance(sampler, NoPositiveResampling) and sampler.rules.threshold == 0.5
    assert {name: getattr(loader, name) for name in options} == options and loader.dataset is dataset
    drawn = [[info["index"] for info in batch["extra_info"]] for batch in loader]
    assert drawn == [[info["index"] for info in batch["extra_info"]] for batch in of_verl()], "in its first epoch"


def test_unknown_option_stops_the_sampler(tmp_path: Path) -> None:
    dataset, config = make_data(tmp_path, [make_row(1)], sampler={**SAMPLER, "treshold": 0.5})
    with pytest.raises(ScaleRLConfigError, match=r"data\.sampler\.treshold does not exist: the keys are class_path"):
        wrap_sampler(None, config, dataset)


class Trainer:
    """verl's PPOTrainer as far as a step needs it: rewards by ground truth, rows in verl's TransferQueue."""

    def __init__(self, folder: Path, num_prompts: int, group_size: int, **data: Any) -> None:
        rows = [make_row(index) for index in range(num_prompts)]
        self.dataset, config = make_data(folder, rows, sampler={**SAMPLER, "log_file": str(folder / "drops.jsonl")})
        config.update(data)
        self.config = OmegaConf.create({"data": config, **ALGORITHM})
        self.group_size, self.step_number, self.iterator = group_size, 0, None
        self.train_dataloader = StatefulDataLoader(
            self.dataset,
            batch_size=config.train_batch_size,
            drop_last=True,
            collate_fn=collate_fn,
            sampler=wrap_sampler(create_rl_sampler(config, self.dataset), config, self.dataset),
        )
        self.columns: list[str] = []

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> str:
        scores_BT = torch.tensor([[row["score"], float("nan")] for row in self.rows])
        mask_BT = torch.tensor([[0 if row["padding"] else 1, 0] for row in self.rows])
        tensors = {"token_level_scores": scores_BT, "response_mask": mask_BT, "advantages": scores_BT.clone()}
        data = DataProto(
            batch=TensorDict(tensors, batch_size=len(self.rows)),
            non_tensor_batch={"uid": np.array([row["uid"] for row in self.rows], dtype=object)},
        )
        fold_row_weights(data)
        return "result"

    def run_step(self) -> tuple[list[int], dict[str, Any]]:
        """Prompts below 2 always pass; of the others every second response. One padding row."""
        self.step_number += 1
        self.iterator = self.iterator or iter(self.train_dataloader)
        try:
            fetched = next(self.iterator)
        except StopIteration:
            self.iterator = iter(self.train_dataloader)
            fetched = next(self.iterator)
        indices = [int(info["index"]) for info in fetched["extra_info"]]
        self.rows = [
            {
                "uid": f"{self.step_number}-{position}",
                "key": f"{self.step_number}-{position}_{session}_0",
                "id": fetched[COLUMN][position],
                "score": 1.0 if index < 2 or session % 2 else -1.0,
                "padding": False,
            }
            for position, index in enumerate(indices)
            for session in range(self.group_size)
        ]
        self.rows.append({**self.rows[0], "key": "pad_0_0", "score": -1.0, "padding": True})
        random.Random(self.step_number).shuffle(self.rows)
        tags = [{"global_steps": self.step_number} for _ in self.rows]
        batch = KVBatchMeta(partition_id="train", keys=[row["key"] for row in self.rows], tags=tags)
        metrics: dict[str, Any] = {}
        assert self._compute_advantage(batch, metrics) == "result"
        return indices, metrics


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    made = in_front_of(Trainer)(tmp_path, num_prompts=6, group_size=4)

    def kv_batch_get(keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        assert partition_id == "train"
        if select_fields == ["extra_fields"]:
            return tu.get_tensordict({"extra_fields": [{} for _ in keys]})
        ids = {row["key"]: row["id"] for row in made.rows}
        return tu.get_tensordict({COLUMN: np.array([ids[key] for key in keys], dtype=object)})

    monkeypatch.setattr("transfer_queue.kv_batch_get", kv_batch_get)
    return made


def test_training_steps_feed_the_history_and_later_epochs_skip_what_passed(trainer: Trainer) -> None:
    steps = [trainer.run_step() for _ in range(7)]
    assert [indices for indices, _ in steps] == [[0, 1], [2, 3], [4, 5], [2, 3], [4, 5], [2, 3], [4, 5]]
    names = ("epoch_max", "prompts_remaining_min", "dropped_this_epoch_max", "dropped_in_all_max", "visits_sum")
    metrics = [[values[f"scalerl/data/curriculum_{name}"] for name in names] for _, values in steps]
    assert metrics[0] == [1, 6, 0, 0, 2] and metrics[3] == [2, 4, 2, 2, 2] and metrics[6] == [3, 4, 0, 2, 2]
    mastered = [values["scalerl/data/curriculum_mastered_visits_sum"] for _, values in steps]
    assert mastered == [2, 0, 0, 0, 0, 0, 0]
    sampler = find_sampler(trainer)
    assert sampler is not None
    # The padding row, a wrong one, did not count.
    visit = sampler.history.get(prompt_id(make_row(0)))
    assert visit is not None and (visit.passed, visit.responses) == (4, 4)


def test_file_says_what_was_dropped_when_and_why(trainer: Trainer, tmp_path: Path) -> None:
    for _ in range(4):
        trainer.run_step()
    lines = read_records(tmp_path / "drops.jsonl")
    assert [line["event"] for line in lines] == ["epoch", "dropped", "dropped", "epoch"]
    assert lines[3] | {"utc": ""} == {
        "event": "epoch",
        "epoch": 2,
        "num_dropped": 2,
        "num_readmitted": 0,
        "num_dropped_in_all": 2,
        "num_remaining": 4,
        "utc": "",
    }
    dropped = {line["prompt"]: line for line in lines[1:3]}
    assert sorted(dropped) == ["0+1", "1+1"]
    line = dropped["1+1"]
    assert (line["epoch"], line["rows"], line["data_source"], line["pass_rate"]) == (2, [1], "tests/sum", 1.0)
    assert line["why"] == "latest pass rate 1 (4 of 4 responses) >= 0.9"
    assert line["last_visit_step"] == 1 and line["prompt_id"] == prompt_id(make_row(1))


def test_mini_batches_of_a_step_combine_as_the_names_say() -> None:
    aggregator = MetricsAggregator()
    for epoch, remaining, visits in ((1, 6, 2), (2, 4, 3)):
        values = {
            "scalerl/data/curriculum_epoch_max": epoch,
            "scalerl/data/curriculum_prompts_remaining_min": remaining,
            "scalerl/data/curriculum_dropped_this_epoch_max": epoch,
            "scalerl/data/curriculum_dropped_in_all_max": 6 - remaining,
            "scalerl/data/curriculum_visits_sum": visits,
            "scalerl/data/curriculum_mastered_visits_sum": visits,
        }
        aggregator.add_step_metrics(values, sample_count=8)
    assert list(aggregator.get_aggregated_metrics().values()) == [2, 4, 2, 2, 5, 5]


def test_sampler_that_verl_did_not_take_is_a_loud_error(trainer: Trainer) -> None:
    trainer.train_dataloader = StatefulDataLoader(trainer.dataset, collate_fn=collate_fn)
    with pytest.raises(PatchError, match=r"draws from \w*Sampler: .* use another trainer\.v1\.trainer_mode"):
        find_sampler(trainer)
    trainer.config.data.pop("sampler")
    assert find_sampler(trainer) is None


def test_rows_without_the_id_are_refused(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer_queue.kv_batch_get", lambda **_: tu.get_tensordict({"a": torch.zeros(1)}))
    with pytest.raises(ValueError, match=rf"no field {COLUMN}.*agent loop"):
        trainer.run_step()


def test_rewards_that_took_another_way_are_refused() -> None:
    sampler = NoPositiveResampling(range(1), ["a"], ResamplingRules())
    with pytest.raises(PatchError):
        record_visits(sampler, None, AdvantageStep("token-mean", {}))


def test_rewards_are_kept_only_for_the_sampler() -> None:
    with advantage_step(OmegaConf.create(ALGORITHM), {}) as step:
        data = DataProto(batch=TensorDict({"response_mask": torch.ones(1, 1)}, batch_size=1))
        fold_row_weights(data)
    assert step.rewards_B is None and not step.keep_rewards


def change_of(epoch: int, *dropped: DroppedPrompt) -> EpochChange:
    return EpochChange(epoch, dropped, (), (), 3, len(dropped))


def events(path: Path) -> list[tuple[int, str]]:
    return [(line["epoch"], line["event"]) for line in read_records(path)]


def test_file_of_a_resumed_run_has_no_lines_of_epochs_that_did_not_happen(tmp_path: Path) -> None:
    path = tmp_path / "new" / "drops.jsonl"
    prompt = DroppedPrompt("a", 4, 4, 1)
    drops = DropList(path, ResamplingRules(), lambda _: {})
    for change in (change_of(1), change_of(2, prompt), change_of(3, prompt)):
        drops.epoch_began(change)
    with path.open("a") as stream:
        stream.write('{"event": "dro')
    resumed = DropList(path, ResamplingRules(), lambda _: {})
    resumed.resumed(2)
    assert events(path) == [(1, "epoch"), (2, "dropped"), (2, "epoch")]
    resumed.epoch_began(change_of(3, prompt))
    assert events(path)[-2:] == [(3, "dropped"), (3, "epoch")]
    assert path.with_name("drops.jsonl.superseded").read_bytes().count(b"\n") == 3
    DropList(path, ResamplingRules(), lambda _: {}).epoch_began(change_of(1))
    assert events(path) == [(1, "epoch")], "a new run begins a new file"
    assert path.with_name("drops.jsonl.superseded").read_bytes().count(b"\n") == 8


def test_floor_and_readmission_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "drops.jsonl"
    rules = ResamplingRules(min_prompts=3, history="cumulative")
    change = EpochChange(2, (), (DroppedPrompt("b", 9, 10, 4),), ("c",), 3, 0)
    DropList(path, rules, lambda key: {"prompt": key.upper()}).epoch_began(change)
    kept, back, _ = read_records(path)
    assert kept["event"] == "kept_by_floor" and kept["prompt"] == "B"
    assert kept["why"] == (
        "cumulative pass rate 0.9 (9 of 10 responses) >= 0.9, but fewer than 3 prompts would be left"
    )
    assert (back["event"], back["prompt_id"], back["prompt"]) == ("readmitted", "c", "C")


def test_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"data\.sampler\.log_file=.*cannot be written"):
        DropList(tmp_path / "file" / "drops.jsonl", ResamplingRules(), lambda _: {})


def test_floor_of_null_is_left_to_the_start_up_check() -> None:
    assert read_rules({"class_path": SAMPLER_CLASS, "min_prompts": None}).min_prompts == 1
    config = OmegaConf.create({"data": {"train_batch_size": 8, "sampler": {"class_path": SAMPLER_CLASS}}})
    assert list(broken(RULES, config)) == []


def test_section_that_verl_would_ignore_is_refused() -> None:
    config = OmegaConf.create({"data": {"train_batch_size": 8, "sampler": {"threshold": 0.5}}})
    assert "names no sampler" in next(broken(RULES, config))
    assert SAMPLER_CLASS in next(broken(RULES, config))


@pytest.mark.fault("dynamic sampling: the curriculum never learns of prompts that always pass")
def test_groups_that_no_step_sees_are_judged_as_those_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By acc, not by the reward; a response without a sampled token is none; a prompt's visit of one step is one."""
    data = {
        "rm_scores": torch.tensor([[0.0, 0.5], [0.0, 0.5], [0.0, -1.0], [0.0, -1.0], [0.0, -1.0]]),
        "extra_fields": np.array([{"reward_extra_info": {"acc": acc}} for acc in (1, 1, 0, 0, 0)], dtype=object),
        COLUMN: np.array(["right", "right", "wrong", "wrong", "wrong"], dtype=object),
    }
    asked = lambda select_fields, **_: {name: data[name] for name in select_fields}  # noqa: E731
    monkeypatch.setattr("transfer_queue.kv_batch_get", asked)
    keys = ["a_0_0", "a_1_0", "b_0_0", "b_1_0", "b_2_0"]
    batch = KVBatchMeta(keys=keys, tags=[{"global_steps": 3}] * 5, partition_id="train")
    visits = tally_rejected(OmegaConf.create({"algorithm": {}}), batch, [2, 2, 2, 2, 0])
    assert visits == {("right", 3): (2, 2), ("wrong", 3): (0, 2)}
    add_visits(visits, {("right", 3): (1, 2), ("right", 4): (0, 2)})
    assert visits == {("right", 3): (3, 4), ("wrong", 3): (0, 2), ("right", 4): (0, 2)}
