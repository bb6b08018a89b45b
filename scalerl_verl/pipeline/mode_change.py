# SPDX-License-Identifier: Apache-2.0
"""A checkpoint with a queue of prompts that is resumed in another trainer mode than it was made in."""

from __future__ import annotations

import logging
import os
from typing import Any

import transfer_queue as tq

from scalerl_verl.columns import queue_rows
from scalerl_verl.names import PIPELINE_RL, PPO_OFF_POLICY, TRAINER_MODE
from scalerl_verl.names.asking import trainer_mode
from scalerl_verl.pipeline.failures import WAITING_TAG

logger = logging.getLogger(__name__)


def hand_over_queue(trainer: Any, checkpoint_folder: str | None) -> None:
    """Let verl's asynchronous modes start the prompts that wait; say so where a mode reads no queue.

    Args:
        trainer: verl's, after loading the checkpoint and before it starts unfinished prompts again.
        checkpoint_folder: that of the step; None if the run starts from nothing.
    """
    mode = trainer_mode(trainer.config)
    if checkpoint_folder is None or mode == PIPELINE_RL:
        return
    if mode in ("sync", PPO_OFF_POLICY):
        if os.path.exists(os.path.join(checkpoint_folder, "transfer_queue")):
            logger.warning(
                "%s has a queue of prompts that were drawn and not trained, which %s=%s does not read: these prompts "
                "are left out until the next epoch. Resume in the mode of the checkpoint to train them.",
                checkpoint_folder,
                TRAINER_MODE,
                mode,
            )
        return
    waiting = [key for key, tag in queue_rows("train").items() if tag.get(WAITING_TAG, False)]
    if waiting:
        tag = {"is_prompt": True, "status": "pending", WAITING_TAG: False}
        tq.kv_batch_put(keys=waiting, partition_id="train", tags=[tag for _ in waiting])
        trainer._restored_tq_prompt_count += len(waiting)
