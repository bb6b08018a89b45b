# SPDX-License-Identifier: Apache-2.0
"""verl's data column ``__rollout_n__``: prompts that ask for another number of responses than ``rollout.n``.

The replay buffer's side is in test_resuming_otherwise.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pyarrow.parquet
import pytest

from scalerl_verl.advantage import group_size_checks
from scalerl_verl.columns import ROLLOUT_N
from scalerl_verl.curriculum import settings as curriculum_settings
from scalerl_verl.curriculum.verl import wrap_sampler
from scalerl_verl.names import SAMPLER_CLASS
from scalerl_verl.names.rules import broken
from tests.faults.test_optimizer_steps import GROUP, Trainer, queue, sampled  # noqa: F401 - a fixture
from tests.unit.composed import changed
from tests.unit.curriculum.test_curriculum import make_data, make_row


def write(path: Path, column: list[Any] | None) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x"] * 2} | ({ROLLOUT_N: column} if column else {})), path)
    return path


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ([4, 0], "holds 0"),
        ([4, None], "is empty in 1 rows"),
        ([4.0, 2.0], "is of type double"),
        (["4", "2"], "is of type string"),
        ([4, 1], "leaves 0 for a single one; correct the column to 2 or more"),
    ],
)
def test_column_that_would_fail_or_train_nothing_is_refused_at_start(
    column: list[Any], said: str, tmp_path: Path
) -> None:
    config = changed("recipe", {})
    (problem,) = group_size_checks.find_problems(config, "data.train_files", [write(tmp_path / "a.parquet", column)])
    assert problem.startswith(f"data.train_files={tmp_path}/a.parquet: the column __rollout_n__ ") and said in problem


def test_column_that_some_files_lack_is_refused_and_a_sound_one_is_not(tmp_path: Path) -> None:
    """Fault: verl fills such rows with None, and all their groups fail."""
    with_column, without = write(tmp_path / "with.parquet", [1, 64]), write(tmp_path / "without.parquet", None)
    (problem,) = group_size_checks.find_problems(changed("recipe", {}), "data.val_files", [without, with_column])
    assert problem.startswith(f"data.val_files={without} has no column __rollout_n__, but {with_column} has")
    for files, config in (([with_column], changed("grpo", {})), ([without], changed("recipe", {}))):
        assert not list(group_size_checks.find_problems(config, "data.train_files", files))


@pytest.mark.parametrize("preset", ["recipe", "grpo"])
def test_batch_of_larger_groups_is_one_version_of_a_pipeline_run(preset: str, queue: None) -> None:  # noqa: F811
    """Fault: verl cuts what exceeds train_batch_size * rollout.n rows into further optimizer steps."""
    config = changed(
        preset,
        {
            "data.train_batch_size": 6,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 6,
            "actor_rollout_ref.actor.use_dynamic_bsz": True,
            "actor_rollout_ref.rollout.n": GROUP,
            "trainer.v1.trainer_mode": "pipeline_rl",
        },
    )
    for sizes in ([2 * GROUP] * 6, [1, 2, 3, 9, 9, 9], [1] * 6):
        trainer, batch = Trainer(config, 2), sampled(sizes)
        given = sorted(batch.keys)
        batch = trainer._balance_batch(batch, {})
        division = trainer.scalerl.division
        rows_per_step = 6 * GROUP if division is None else division.rows_per_step
        assert len(batch) == rows_per_step and rows_per_step % GROUP == 0
        assert sorted(key for key in batch.keys if not key.startswith("pad")) == given


def test_prompt_of_few_responses_is_dropped_by_all_of_them(tmp_path: Path) -> None:
    """Fault: half a group of rollout.n is more than such a prompt ever has, so it would never be dropped."""
    sizes = [4, 16, 2, 4]
    rows = [make_row(index, **{ROLLOUT_N: size}) for index, size in enumerate(sizes)]
    section = {"class_path": SAMPLER_CLASS, "min_prompts": 1, "min_responses": 8}
    dataset, config = make_data(tmp_path, rows, sampler=section)
    sampler = wrap_sampler(range(4), config, dataset)
    ids = sampler._ids
    assert [sampler.group_sizes[prompt] for prompt in ids] == sizes
    for prompt, responses in zip(ids, [4, 4, 2, 3], strict=True):
        sampler.history.record(prompt, 1, responses, responses)
    sampler.begin_epoch()
    change = sampler.begin_epoch()
    assert {prompt.prompt_id for prompt in change.dropped} == {ids[0], ids[2]}, "whole groups of 4 and 2"


@pytest.mark.parametrize("as_list", [False, True])
def test_sizes_of_prompts_make_room_for_more_min_responses_than_the_run_s_group_has(
    as_list: bool, tmp_path: Path
) -> None:
    """Fault: a run whose prompts ask for 64 responses was refused because rollout.n is 16."""
    path = str(write(tmp_path / "a.parquet", [64, 8]))
    keys = {"actor_rollout_ref.rollout.n": 16, "data.sampler.min_responses": 32}
    config = changed("recipe", {**keys, "data.train_files": [path] if as_list else path})
    assert not list(broken(curriculum_settings.RULES, config))
    for files in (str(write(tmp_path / "b.parquet", None)), str(tmp_path / "none.parquet"), str(tmp_path), None, 3):
        (problem,) = broken(curriculum_settings.RULES, changed("recipe", {**keys, "data.train_files": files}))
        assert "min_responses=32 is more than the actor_rollout_ref.rollout.n=16 responses of a visit" in problem


def test_prompts_without_the_column_are_judged_as_before(tmp_path: Path) -> None:
    dataset, config = make_data(tmp_path, [make_row(0)], sampler={"class_path": SAMPLER_CLASS})
    assert wrap_sampler(range(1), config, dataset).group_sizes == {}
    assert ROLLOUT_N not in pandas.read_parquet(tmp_path / "train.parquet").columns
