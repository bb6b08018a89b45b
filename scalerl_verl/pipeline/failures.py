# SPDX-License-Identifier: Apache-2.0
"""Failures of generators and responses: which pass by themselves, and how the trainer learns of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
import transfer_queue as tq

from scalerl_verl.names import PIPELINE_RL

ERROR_TAG = "scalerl_error"
"""Tag of a prompt's row that holds the last error of its agent loops."""
WAITING_TAG = "scalerl_waiting"
"""Tag of a prompt of a restored queue that the admission rule has no room for yet; to verl it is no prompt."""
MAX_CHARACTERS = 500
FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 120.0


def is_unreachable(error: BaseException) -> bool:
    """Whether a call did not get through to an actor that may well live: Ray says that it may come back."""
    return isinstance(error, ray.exceptions.ActorUnavailableError)


def strike_pause_s(strikes: int) -> float:
    """Seconds to leave a generator alone that could not be reached ``strikes`` times in a row: 10, 20, 40, 80, 120."""
    return min(FIRST_PAUSE_S * 2.0 ** (strikes - 1), LONGEST_PAUSE_S)


def describe(error: BaseException) -> str:
    """Type and message on one line, cut to `MAX_CHARACTERS`."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " ..."


async def as_coroutine(ref: Any) -> Any:
    """The result of a Ray call, for what in asyncio wants a coroutine."""
    return await ref


async def note_failure(config: Any, trajectory: Mapping[str, Any], uid: str | None, error: Exception) -> None:
    """Leave an error of an agent loop at the row of its prompt (pipeline_rl; validation goes verl's way).

    Args:
        config: the run's config.
        trajectory: verl's description of the response, which says whether it is for validation.
        uid: the prompt's key; None outside of verl's V1 trainers.
        error: what the loop raised.
    """
    if uid is None or trajectory["validate"] or config.trainer.v1.trainer_mode != PIPELINE_RL:
        return
    await tq.async_kv_put(key=uid, partition_id="train", tag={ERROR_TAG: describe(error)})
