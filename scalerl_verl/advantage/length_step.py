# SPDX-License-Identifier: Apache-2.0
"""Lengths of responses: metrics under ``scalerl/length/`` and the truncation alarm (runs on the driver).

Those of a training batch stand there by name, those of a validation, which has budgets of its own, under
``scalerl/length/val/``. The alarm watches training only; its window is kept in the checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig

from scalerl_verl.advantage.sessions import index_sessions
from scalerl_verl.advantage.shaping_step import read_extra_fields
from scalerl_verl.advantage.step import AdvantageStep, uses_names
from scalerl_verl.bookkeeping import bookkeeping
from scalerl_verl.engine_context import engine_context, fills_context, is_at_limit, read_hf_config, warn_of_clamps
from scalerl_verl.errors import PatchError, TruncationError
from scalerl_verl.interruption.lengths import TruncationAlarm, summarize_records, summarize_truncation
from scalerl_verl.interruption.response import RECORD_KEY
from scalerl_verl.interruption.settings import asks_for_interruption, read_alarm
from scalerl_verl.json_lines import replace_file
from scalerl_verl.names import ALARM_SECTION, SHAPING_SECTION, STOP, select
from scalerl_verl.upstream.registry import require_active

PREFIX = "scalerl/length/"
VAL_PREFIX = f"{PREFIX}val/"
STATE_FILE = "scalerl_truncation.json"
_logger = logging.getLogger(__name__)


def watches_lengths(config: Any) -> bool:
    """Whether this run reports lengths: it uses one of our names in its training step, its loop or its alarm."""
    if not isinstance(config, DictConfig):
        return False
    return (
        uses_names(config)
        or bool(select(config, SHAPING_SECTION))
        or asks_for_interruption(config)
        or select(config, ALARM_SECTION) is not None
    )


def make_alarm(config: Any) -> TruncationAlarm:
    """The alarm of a run, its window empty."""
    return TruncationAlarm(read_alarm(select(config, ALARM_SECTION) if isinstance(config, DictConfig) else None))


def save_alarm(alarm: TruncationAlarm, config: Any, checkpoint_folder: str) -> None:
    """Write the alarm's window into a checkpoint's folder, in a run that reports lengths."""
    if watches_lengths(config):
        with bookkeeping(STATE_FILE, "A run that resumes there begins with an empty window of the truncation alarm"):
            replace_file(Path(checkpoint_folder) / STATE_FILE, json.dumps(alarm.state_dict()).encode())


def restore_alarm(alarm: TruncationAlarm, config: Any, checkpoint_folder: str | None) -> None:
    """Continue with a checkpoint's window; it starts empty without one (None, or a checkpoint that has none).

    Raises:
        ValueError: the file holds something else.
    """
    if checkpoint_folder is None or not watches_lengths(config):
        return
    path = Path(checkpoint_folder) / STATE_FILE
    if not path.exists():
        return
    try:
        alarm.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; restore the file, or delete it to start with an empty window") from error


@dataclass(frozen=True)
class BatchLengths:
    """The responses of a batch.

    Args:
        rows: row of the last output of each, in the order of the batch; padding rows are no responses.
        prompt_ids: of each: verl's uid, one of each draw of a row.
        truncated_R: which ran out of tokens, [R] bool.
        clamped_R: of these, which the engine had no more room for, [R] bool.
        records: of each, see `LengthRecord`; None where another loop made it.
    """

    rows: list[int]
    prompt_ids: list[str]
    truncated_R: NDArray[np.bool_]
    clamped_R: NDArray[np.bool_]
    records: list[Any]


def read_lengths(config: DictConfig, batch: Any) -> BatchLengths:
    """Look into a batch of verl (KVBatchMeta: keys and tags of the rows).

    A response of another agent loop has no record: it counts as truncated if it has the greatest length allowed, or
    fills the engine's context.
    """
    # One whose tokens are all masked is a response: it may be nothing but cut.
    rows = [row for row, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
    finals = sorted(rows[index] for index in index_sessions([batch.keys[row] for row in rows]).final_row_S.tolist())
    fields: Sequence[Any] = [{}] * len(batch.keys)
    if asks_for_interruption(config):
        fields = read_extra_fields(batch)
    records = [fields[row].get(RECORD_KEY) for row in finals]
    max_length = int(config.data.max_response_length)
    room = engine_context(config, read_hf_config(config))
    tags = [batch.tags[row] for row in finals]
    truncated = [
        bool(record["truncated"]) if record else is_at_limit(tag, max_length, room)
        for tag, record in zip(tags, records, strict=True)
    ]
    clamped = [
        bool(record.get("clamped")) if record else int(tag["response_len"]) < max_length and fills_context(tag, room)
        for tag, record in zip(tags, records, strict=True)
    ]
    warn_of_clamps(sum(clamped), room, max_length)
    return BatchLengths(
        rows=finals,
        prompt_ids=[batch.keys[row].rsplit("_", 2)[0] for row in finals],
        truncated_R=np.array(truncated, dtype=np.bool_),
        clamped_R=np.array(clamped, dtype=np.bool_),
        records=records,
    )


def _summarize(
    truncated_R: NDArray[np.bool_],
    clamped_R: NDArray[np.bool_],
    prompt_ids: Sequence[str],
    records: Sequence[Any],
    rewards_R: NDArray[np.float64],
) -> dict[str, float]:
    recorded = [index for index, record in enumerate(records) if record]
    found = summarize_truncation(truncated_R, prompt_ids)
    if clamped_R.size:
        found["clamped_fraction"] = float(clamped_R.mean())
    return found | summarize_records(
        [records[index] for index in recorded], rewards_R[np.array(recorded, dtype=np.int64)]
    )


def record_lengths(alarm: TruncationAlarm, config: DictConfig, batch: Any, step: AdvantageStep) -> None:
    """Report the lengths of one batch, and raise the alarm if too many responses are cut.

    Args:
        alarm: the run's; its window moves on.
        config: the whole one.
        batch: verl's KVBatchMeta (keys and tags of the rows), in the order of the rows that were folded.
        step: holds the rewards of the rows; its metrics are added to.

    Raises:
        PatchError: the rewards did not pass through `fold_row_weights`.
        TruncationError: the alarm, with ``on_alarm=stop``.
    """
    if step.rewards_B is None:
        require_active("verl.training_step.weights")
        raise PatchError(
            "the rewards of this training step did not pass through scalerl_verl: this verl computes advantages in a "
            "way that is not known here. Install a version that 'scalerl doctor' lists"
        )
    lengths = read_lengths(config, batch)
    rewards_R = step.rewards_B[np.array(lengths.rows, dtype=np.int64)]
    found = _summarize(lengths.truncated_R, lengths.clamped_R, lengths.prompt_ids, lengths.records, rewards_R)
    is_new = alarm.observe(int(lengths.truncated_R.sum()), lengths.truncated_R.size)
    found |= {"truncated_window_fraction": alarm.fraction, "truncation_alarm_max": float(alarm.raised)}
    step.metrics.update({f"{PREFIX}{name}": value for name, value in found.items()})
    if is_new:
        if alarm.settings.on_alarm == STOP:
            raise TruncationError(alarm.message())
        _logger.warning(alarm.message())


@dataclass
class ValidationLengths:
    """What is known of the responses of one validation, batch by batch in verl's order of its samples.

    Args:
        config: the whole one.
        batches: as they were sampled.
        rewards: of all responses, which verl has at the end.
    """

    config: DictConfig
    batches: list[BatchLengths] = field(default_factory=list)
    rewards: list[float] | None = None

    def note_rewards(self, rewards: Sequence[float]) -> None:
        """Keep the rewards of all responses."""
        self.rewards = [float(reward) for reward in rewards]

    def metrics(self, find_prompts: Callable[[Sequence[str]], list[str]] = list) -> dict[str, float]:
        """Metrics of the validation; none if verl sampled nothing.

        Args:
            find_prompts: the prompts of verl's uids.

        Raises:
            PatchError: verl scored other responses than were sampled.
        """
        records = [record for batch in self.batches for record in batch.records]
        if not records:
            return {}
        if self.rewards is None or len(self.rewards) != len(records):
            scored = "none" if self.rewards is None else len(self.rewards)
            raise PatchError(
                f"a validation sampled {len(records)} responses and scored {scored}: verl's validation is not one that "
                "is known here. Install a version that 'scalerl doctor' lists"
            )
        found = _summarize(
            np.concatenate([batch.truncated_R for batch in self.batches]),
            np.concatenate([batch.clamped_R for batch in self.batches]),
            find_prompts([uid for batch in self.batches for uid in batch.prompt_ids]),
            records,
            np.array(self.rewards, dtype=np.float64),
        )
        return {f"{VAL_PREFIX}{name}": value for name, value in found.items()}


@contextlib.contextmanager
def watch_validation(config: DictConfig, buffer: Any) -> Iterator[ValidationLengths | None]:
    """Look at each batch that verl's validation takes from its replay buffer, before it deletes it.

    None in a run that reports no lengths.
    """
    if not watches_lengths(config):
        yield None
        return
    lengths = ValidationLengths(config)
    original = buffer.sample

    def sample(*args: Any, **kwargs: Any) -> Any:
        batch, metrics = original(*args, **kwargs)
        lengths.batches.append(read_lengths(config, batch))
        return batch, metrics

    buffer.sample = sample
    try:
        yield lengths
    finally:
        del buffer.sample
