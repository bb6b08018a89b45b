# SPDX-License-Identifier: Apache-2.0
"""Lengths of each training batch: metrics under ``scalerl/length/`` and the truncation alarm (runs on the driver)."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from scalerl_verl.advantages.sessions import index_sessions
from scalerl_verl.errors import PatchError, TruncationError
from scalerl_verl.plugins.interruption_settings import ALARM_SECTION, asks_for_interruption, read_alarm
from scalerl_verl.plugins.reward_shaping import read_extra_fields
from scalerl_verl.plugins.training_step import AdvantageStep
from scalerl_verl.rollout.interruption import RECORD_KEY
from scalerl_verl.rollout.lengths import TruncationAlarm, summarize_records, summarize_truncation
from scalerl_verl.upstream.registry import require_active

PREFIX = "scalerl/length/"
_logger = logging.getLogger(__name__)


def watches_lengths(config: Any, step: AdvantageStep) -> bool:
    """Whether this run reports lengths: it uses one of our names in its training step, its loop or its alarm."""
    if not isinstance(config, DictConfig):
        return False
    return (
        step.uses_names
        or bool(step.shapings)
        or asks_for_interruption(config)
        or OmegaConf.select(config, ALARM_SECTION) is not None
    )


def alarm_of(trainer: Any) -> TruncationAlarm:
    """The alarm of a verl trainer; its window starts empty in each process, a resumed one too."""
    alarm = getattr(trainer, "_scalerl_truncation_alarm", None)
    if alarm is None:
        section = OmegaConf.select(trainer.config, ALARM_SECTION)
        options: Any = OmegaConf.to_container(section, resolve=True) if isinstance(section, DictConfig) else section
        alarm = trainer._scalerl_truncation_alarm = TruncationAlarm(read_alarm(options))
    return alarm


def record_lengths(trainer: Any, batch: Any, step: AdvantageStep) -> None:
    """Report the lengths of one batch, and raise the alarm if too many responses are cut.

    A response of another agent loop has no record: it counts as truncated if it has the greatest length allowed.

    Args:
        trainer: verl's, with the whole config.
        batch: verl's KVBatchMeta (keys and tags of the rows), in the order of the rows that were folded.
        step: holds the rewards of the rows; its metrics are added to.

    Raises:
        PatchError: the rewards did not pass through `fold_row_weights`.
        TruncationError: the alarm, with ``on_alarm=stop``.
    """
    if step.rewards_B is None:
        require_active("verl.training_step.weights")
        raise PatchError("no rewards were seen in this training step: verl computed the advantages in another way")
    # Padding rows are no responses. One whose tokens are all masked is: it may be nothing but cut.
    rows = [row for row, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
    keys = [batch.keys[row] for row in rows]
    finals = [rows[index] for index in index_sessions(keys).final_row_S.tolist()]
    records: list[Any] = [None] * len(batch.keys)
    if asks_for_interruption(trainer.config):
        records = [fields.get(RECORD_KEY) for fields in read_extra_fields(batch)]
    max_length = int(trainer.config.data.max_response_length)
    truncated = [
        bool(records[row]["truncated"]) if records[row] else int(batch.tags[row]["response_len"]) >= max_length
        for row in finals
    ]
    truncated_R = np.array(truncated, dtype=np.bool_)
    recorded = [row for row in finals if records[row]]
    found = summarize_truncation(truncated_R, [batch.keys[row].rsplit("_", 2)[0] for row in finals])
    found |= summarize_records([records[row] for row in recorded], step.rewards_B[np.array(recorded, dtype=np.int64)])
    alarm = alarm_of(trainer)
    is_new = alarm.observe(int(truncated_R.sum()), truncated_R.size)
    found |= {"truncated_window_fraction": alarm.fraction, "truncation_alarm_max": float(alarm.raised)}
    step.metrics.update({f"{PREFIX}{name}": value for name, value in found.items()})
    if is_new:
        if alarm.settings.on_alarm == "stop":
            raise TruncationError(alarm.message())
        _logger.warning(alarm.message())
