# SPDX-License-Identifier: Apache-2.0
"""Reward shaping in verl's training step: what it sees of a batch, and where its rewards go (runs on the driver).

The start-up check and the training step get the registered names from here: a module that registers one is imported
here, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig

from scalerl_verl.advantage import Sessions, length_penalty
from scalerl_verl.advantage.reward_shaping import Responses, RewardShaping, make_reward_shapings, shape_rewards
from scalerl_verl.advantage.rows import count_tokens, sum_rows
from scalerl_verl.columns import read_column
from scalerl_verl.engine_context import is_at_limit
from scalerl_verl.names import SHAPING_SECTION, select
from scalerl_verl.names.numbers import number
from scalerl_verl.names.reading import plain

__all__ = ["SECTION", "find_problems", "make_reward_shapings", "read_extra_fields", "read_shapings", "shape_batch"]

SECTION = SHAPING_SECTION


def read_shapings(config: Any) -> dict[str, RewardShaping]:
    """What the composed config asks for; empty if nothing.

    Raises:
        ValueError: as `make_reward_shapings`.
    """
    return make_reward_shapings(plain(select(config, SECTION)) if isinstance(config, DictConfig) else None)


def find_problems(config: DictConfig) -> Iterator[str]:
    """A length penalty that begins where no response can get (the section itself is checked with its owner)."""
    try:
        shapings = read_shapings(config)
    except ValueError:
        return  # reported with the section
    limit = number(config, "data.max_response_length")
    for name, shaping in shapings.items():
        if not isinstance(shaping, length_penalty.LengthPenalty):
            continue
        max_length, cache = shaping.lengths(limit)
        if max_length - cache >= limit:
            yield (
                f"{SECTION}.{name}: max_length={max_length} less cache_length={cache:g} is where the penalty begins, "
                f"but no response is longer than data.max_response_length={limit}, so it would never act: set "
                f"{SECTION}.{name}.max_length to at most {limit} (null takes that)"
            )


def shape_batch(
    data: Any,
    sessions: Sessions,
    batch: Any,
    shapings: Mapping[str, RewardShaping],
    max_length: int,
    passed_B: NDArray[np.bool_],
    extra_fields: Sequence[Mapping[str, Any]],
    context: int | None = None,
) -> NDArray[np.bool_]:
    """Replace the rewards in ``data`` and say which rows train.

    ``token_level_rewards`` is what every estimator of verl reads, so shaping works with all of them. The scores that
    verl reports, and by which the curriculum counts passes, stay those of the reward function.

    Args:
        data: verl's DataProto before the estimator; ``token_level_rewards`` and ``response_mask`` [B, T].
        sessions: of the same rows.
        batch: verl's KVBatchMeta of the same rows: keys, tags and partition.
        shapings: applied in order.
        max_length: ``data.max_response_length``, tokens.
        passed_B: whether each row passed, by what the reward function gave, [B] bool.
        extra_fields: what the agent loop recorded of each row.
        context: tokens of prompt and response that the engine holds; None if unknown.

    Returns:
        False for rows that a shaping leaves out, [B] bool.
    """
    mask_BT = data.batch["response_mask"].bool()
    num_tokens_B = count_tokens(mask_BT)
    old_B = sum_rows(data.batch["token_level_rewards"], mask_BT)
    length_B = np.array([int(tag["response_len"]) for tag in batch.tags], dtype=np.int64)
    # Padding rows are no responses, and neither is a session without a token that trains.
    chosen_S = sessions.has_any(num_tokens_B > 0)
    final_R = sessions.final_row_S[chosen_S]
    rewards_R, trains_R = shape_rewards(
        shapings,
        Responses(
            rewards_R=old_B[final_R],
            passed_R=passed_B[final_R],
            num_sampled_R=sessions.sum_rows(num_tokens_B)[chosen_S].astype(np.int64),
            length_R=length_B[final_R],
            at_limit_R=np.array([is_at_limit(batch.tags[row], max_length, context) for row in final_R], dtype=np.bool_),
            max_length=max_length,
            prompt_ids_R=[str(data.non_tensor_batch["uid"][row]) for row in final_R.tolist()],
            extra_fields_R=[extra_fields[row] for row in final_R.tolist()],
        ),
    )
    new_S, trains_S = np.zeros(chosen_S.shape), np.ones(chosen_S.shape, dtype=np.bool_)
    new_S[chosen_S], trains_S[chosen_S] = rewards_R, trains_R
    # Every output of a session carries its reward, as verl has it: estimators other than GRPO read each row.
    shaped_B = chosen_S[sessions.index_B] & (new_S[sessions.index_B] != old_B)
    _put_rewards(data, shaped_B, new_S[sessions.index_B] - old_B, length_B)
    return trains_S[sessions.index_B]


def _put_rewards(
    data: Any, rows_B: NDArray[np.bool_], change_B: NDArray[np.float64], length_B: NDArray[np.int64]
) -> None:
    """Add ``change_B`` to the chosen rows at the last token of the response, where verl puts the reward."""
    rewards_BT = data.batch["token_level_rewards"]
    rows = torch.from_numpy(np.flatnonzero(rows_B))
    # A copy: without a KL penalty this is the very tensor of the scores.
    rewards_BT = rewards_BT.clone()
    change = torch.from_numpy(change_B[rows_B]).to(rewards_BT.dtype)
    rewards_BT[rows, torch.from_numpy(length_B[rows_B] - 1)] += change
    data.batch["token_level_rewards"] = rewards_BT


def read_extra_fields(batch: Any) -> list[Mapping[str, Any]]:
    """What the agent loop recorded of each row, from verl's TransferQueue."""
    values = read_column(batch, "extra_fields") or [None] * len(batch.keys)
    return [value if isinstance(value, Mapping) else {} for value in values]
