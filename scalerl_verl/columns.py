# SPDX-License-Identifier: Apache-2.0
"""Rows and columns of verl's TransferQueue as Python objects; how many responses each prompt asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tensordict import NonTensorData

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.names import GROUP_SIZE

ROLLOUT_N = "__rollout_n__"
"""verl's column of the data: responses to generate for this prompt, in place of ``rollout.n``."""
VERSION, MAX_AGE = "scalerl_version", "scalerl_max_age"
"""What the trainer's workers are told with a batch of pipeline_rl: the version that trains, and the greatest age."""
VERSIONS = "versions"
"""In a row's ``extra_fields``: the versions that its tokens were sampled under, ``[[version, tokens], ...]``."""


def objects_of(column: Any) -> list[Any]:
    """The Python objects of a non-tensor column, whichever way verl's TransferQueue returned them."""
    values = column.tolist() if hasattr(column, "tolist") else list(column)
    return [value.data if isinstance(value, NonTensorData) else value for value in values]


def read_column(batch: Any, name: str) -> list[Any] | None:
    """A column of the rows of a batch (verl's KVBatchMeta), from verl's TransferQueue; None if they have none."""
    import transfer_queue

    data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[name])
    return objects_of(data[name]) if name in data.keys() else None  # noqa: SIM118 - a TensorDict iterates over rows


def queue_rows(partition: str) -> dict[str, dict[str, Any]]:
    """Key -> tags of every row of a partition of verl's TransferQueue, prompts and responses."""
    import transfer_queue

    return dict((transfer_queue.kv_list(partition) or {}).get(partition, {}))


def read_group_sizes(batch: Any, uids: Sequence[str]) -> dict[str, int]:
    """Key of each prompt -> responses that it asks for; empty if the data have no such column.

    Args:
        batch: verl's TensorDict of prompts.
        uids: their keys, in its order.

    Raises:
        ScaleRLConfigError: a prompt asks for no whole number of responses.
    """
    if ROLLOUT_N not in batch.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        return {}
    sizes = objects_of(batch[ROLLOUT_N])
    wrong = [size for size in sizes if not is_group_size(size)]
    if wrong:
        raise ScaleRLConfigError(
            [
                f"the data's column {ROLLOUT_N} holds {wrong[0]!r} for a prompt: whole numbers from 1 are allowed "
                f"(responses to this prompt in place of {GROUP_SIZE}); correct the column or delete it"
            ]
        )
    return {uid: int(size) for uid, size in zip(uids, sizes, strict=True)}


def is_group_size(value: Any) -> bool:
    """Whether a prompt can ask for so many responses."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 1
