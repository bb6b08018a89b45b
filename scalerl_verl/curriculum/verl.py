# SPDX-License-Identifier: Apache-2.0
"""No-positive-resampling in verl: the sampler of the training data, and its history fed by each training step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import transfer_queue
from omegaconf import DictConfig

from scalerl_verl.advantage.passing import judge, reward_infos
from scalerl_verl.advantage.step import AdvantageStep
from scalerl_verl.columns import ROLLOUT_N, is_group_size, objects_of, read_column
from scalerl_verl.curriculum import NoPositiveResampling, tally_visits
from scalerl_verl.curriculum.drop_list import DropList
from scalerl_verl.curriculum.few_problems import few_problems_warning
from scalerl_verl.curriculum.prompt_ids import (
    COLUMN,
    UnmarkedDataError,
    find_copies,
    label_dataset,
    warn_of_copies,
)
from scalerl_verl.curriculum.settings import asks_for_curriculum, read_rules
from scalerl_verl.errors import PatchError
from scalerl_verl.names import (
    ACTOR,
    CUSTOM_SAMPLER,
    SAMPLER_CLASS,
    SAMPLER_CLASS_PATH,
    SAMPLER_SECTION,
    TRAINER_MODE,
    select,
)
from scalerl_verl.names.reading import plain
from scalerl_verl.upstream.registry import require_active

Key = tuple[str, int]
"""Id of a prompt, and the step in which it was handed to the generators."""
Counts = tuple[int, int]
"""Responses that passed, and all responses."""
_logger = logging.getLogger(__name__)
_PREVIEW_CHARS = 200
_MAX_ROWS_LISTED = 10
_TRAIN_FILES = "data.train_files"


def wrap_sampler(base: Any, data_config: Any, dataset: Any) -> Any:
    """Our sampler around verl's if ``data.sampler`` names it, else verl's; says which rows are copies.

    Args:
        base: verl's own sampler over ``dataset``.
        data_config: the section ``data``.
        dataset: verl's training data; gets a column with the id of each prompt.

    Raises:
        ScaleRLConfigError: an unknown option.
        ValueError: a dataset whose prompts cannot be marked, or a file that cannot be written.
    """
    section = data_config.get("sampler")
    if section is None or section.get("class_path") != SAMPLER_CLASS:
        find_copies(dataset, data_config, _TRAIN_FILES)
        return base
    options = plain(section)
    rules = read_rules(options)
    try:
        ids = label_dataset(dataset, data_config)
    except UnmarkedDataError as error:
        raise ValueError(
            f"{SAMPLER_SECTION} has to know the prompt of each result: {error}; {error.fix}, or delete the section "
            f"(~{SAMPLER_SECTION})"
        ) from error
    warn_of_copies(ids, _TRAIN_FILES)
    observer = None
    if options.get("log_file"):
        describe = _Describer(ids, dataset, data_config.get("prompt_key", "prompt"))
        observer = DropList(options["log_file"], rules, describe)
    return NoPositiveResampling(base, ids, rules, observer, _read_group_sizes(ids, dataset))


def with_sampler(loader: Any, data_config: Any) -> Any:
    """verl's loader of the training data with the sampler that ``data.sampler`` names.

    Args:
        loader: verl's, not yet read from.
        data_config: the section ``data``.

    Raises:
        ScaleRLConfigError, ValueError: as `wrap_sampler`.
    """
    sampler = wrap_sampler(loader.sampler, data_config, loader.dataset)
    if sampler is loader.sampler:
        return loader
    # A loader's sampler cannot be exchanged: another one, with all that verl gives its own.
    return type(loader)(
        dataset=loader.dataset,
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        sampler=sampler,
    )


def _read_group_sizes(ids: Sequence[str], dataset: Any) -> dict[str, int]:
    """Prompt id -> responses that its rows ask for, the fewest of them; empty without verl's column."""
    if ROLLOUT_N not in dataset.dataframe.column_names:
        return {}
    sizes: dict[str, int] = {}
    for prompt, size in zip(ids, dataset.dataframe[ROLLOUT_N], strict=True):
        if is_group_size(size):
            sizes[prompt] = min(int(size), sizes.get(prompt, int(size)))
    return sizes


class _Describer:
    """Prompt id -> rows of the data, data source and beginning of the prompt."""

    def __init__(self, ids: list[str], dataset: Any, prompt_key: str) -> None:
        self._rows: dict[str, list[int]] = {}
        for row, prompt in enumerate(ids):
            self._rows.setdefault(prompt, []).append(row)
        self._dataset = dataset
        self._prompt_key = prompt_key

    def __call__(self, prompt_id: str) -> Mapping[str, Any]:
        rows = self._rows.get(prompt_id, [])
        found: dict[str, Any] = {"rows": rows[:_MAX_ROWS_LISTED], "num_rows": len(rows)}
        if rows:
            frame = self._dataset.dataframe
            keys = [key for key in ("data_source", self._prompt_key) if key in frame.column_names]
            row = frame.select_columns(keys)[rows[0]]
            found["data_source"] = row.get("data_source")
            messages = row[self._prompt_key]
            last = messages[-1].get("content") if isinstance(messages, list) and messages else messages
            found["prompt"] = str(last)[:_PREVIEW_CHARS]
        return found


def find_sampler(trainer: Any) -> NoPositiveResampling | None:
    """The sampler of a verl trainer if it is ours.

    Raises:
        PatchError: the config names ours, but verl made another one.
    """
    sampler = getattr(getattr(trainer, "train_dataloader", None), "sampler", None)
    if isinstance(sampler, NoPositiveResampling):
        return sampler
    if isinstance(trainer.config, DictConfig) and asks_for_curriculum(trainer.config):
        raise PatchError(
            f"{SAMPLER_CLASS_PATH}={SAMPLER_CLASS}, but {type(trainer).__name__} draws from {type(sampler).__name__}: "
            f"this trainer does not make its loader in verl's _init_dataloader; use another {TRAINER_MODE} or delete "
            f"the section (~{SAMPLER_SECTION})"
        )
    return None


def warn_of_few_problems(trainer: Any) -> None:
    """Log, once, that the problems of a run with our sampler are few (see `few_problems`).

    Args:
        trainer: verl's V1 trainer, with its loader.
    """
    sampler = find_sampler(trainer)
    if sampler is None:
        return
    batch = int(trainer.config.data.train_batch_size)
    mini = int(select(trainer.config, f"{ACTOR}.ppo_mini_batch_size", batch))
    warning = few_problems_warning(sampler.num_remaining, mini, trainer.total_training_steps * batch / mini)
    if warning is not None:
        _logger.warning("%s", warning)


def record_visits(
    sampler: NoPositiveResampling, batch: Any, step: AdvantageStep, rejected: Mapping[Key, Counts] | None = None
) -> None:
    """Feed the rewards of one batch to the sampler's history and report where the curriculum stands.

    Args:
        sampler: ours.
        batch: verl's KVBatchMeta (keys and tags of the rows), in the order of the rows that were folded.
        step: holds the rewards of the rows.
        rejected: visits of prompts whose groups dynamic sampling gave up, from `tally_rejected`.

    Raises:
        PatchError: the rewards did not pass through `fold_row_weights`.
        ValueError: the rows carry no prompt id.
        RewardError: the reward function gave something that neither passes nor fails.
    """
    if step.rewards_B is None or step.trains_B is None:
        require_active("verl.training_step.weights")
        raise PatchError(
            "the rewards of this training step did not pass through scalerl_verl: this verl computes advantages in a "
            "way that is not known here. Install a version that 'scalerl doctor' lists"
        )
    visits = tally_visits(
        _require_prompt_ids(batch),
        list(batch.keys),
        [int(tag.get("global_steps", 0)) for tag in batch.tags],
        step.judge_rows(step.rewards_B),
        step.trains_B,
    )
    add_visits(visits, rejected or {})
    for (prompt_id, at_step), (passed, responses) in visits.items():
        sampler.history.record(prompt_id, at_step, passed, responses)
    mastered = sum(
        sampler.rules.is_mastered(passed, responses, sampler.group_sizes.get(prompt_id))
        for (prompt_id, _), (passed, responses) in visits.items()
    )
    # verl combines the mini-batches of a step by words in the names: see MetricsAggregator.
    step.metrics.update(
        {
            "scalerl/data/curriculum_epoch_max": sampler.epoch,
            "scalerl/data/curriculum_prompts_remaining_min": sampler.num_remaining,
            "scalerl/data/curriculum_dropped_this_epoch_max": sampler.num_dropped_this_epoch,
            "scalerl/data/curriculum_dropped_in_all_max": sampler.num_dropped,
            "scalerl/data/curriculum_visits_sum": len(visits),
            "scalerl/data/curriculum_mastered_visits_sum": mastered,
        }
    )


def tally_rejected(config: Any, batch: Any, num_sampled: Sequence[int]) -> dict[Key, Counts]:
    """Visits of groups that no training step will see, judged as those of a batch are.

    Args:
        config: the run's.
        batch: verl's KVBatchMeta of their rows, which are still in the queue.
        num_sampled: tokens of each row that the generator sampled; a row without any is no response.

    Raises:
        RewardError: the reward function gave something that neither passes nor fails.
    """
    fields = ["rm_scores", "extra_fields"]
    data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    rewards = np.array([float(scores.sum()) for scores in data["rm_scores"].unbind()])
    trains = np.array(num_sampled) > 0
    passed = judge(config, rewards, reward_infos(objects_of(data["extra_fields"])))
    steps = [int(tag.get("global_steps", 0)) for tag in batch.tags]
    return tally_visits(_require_prompt_ids(batch), list(batch.keys), steps, passed, trains)


def add_visits(visits: dict[Key, Counts], more: Mapping[Key, Counts]) -> None:
    """Add visits to others; the same prompt of the same step is one visit."""
    for key, (passed, responses) in more.items():
        before = visits.get(key, (0, 0))
        visits[key] = (before[0] + passed, before[1] + responses)


def _require_prompt_ids(batch: Any) -> list[str]:
    ids = read_column(batch, COLUMN)
    if ids is None:
        raise ValueError(
            f"the rows of this batch have no field {COLUMN}, by which {SAMPLER_SECTION} knows their prompt: an agent "
            f"loop or a custom sampler ({CUSTOM_SAMPLER}) drops fields of the data; let it pass them on"
        )
    return [str(value) for value in ids]
