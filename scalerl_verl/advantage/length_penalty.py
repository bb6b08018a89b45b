# SPDX-License-Identifier: Apache-2.0
"""Reward shapings for long responses: a length penalty, and a rule that leaves truncated responses out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scalerl_verl.advantage.reward_shaping import Responses, RewardShaping, register_reward_shaping
from scalerl_verl.interruption.response import RECORD_KEY
from scalerl_verl.names import ALGORITHM_SECTION, EXCLUDE_TRUNCATED, LENGTH_PENALTY, SHAPING_SECTION
from scalerl_verl.names.keys import PAPER_ANSWER, PAPER_TOTAL, wrong_fields

_SECTION = f"{SHAPING_SECTION}.{LENGTH_PENALTY}"
_PATH = _SECTION.removeprefix(f"{ALGORITHM_SECTION}.")


def length_penalty(num_tokens: ArrayLike, max_length: float, cache_length: float) -> NDArray[np.float64]:
    """``clip((L_max - |y|) / L_cache - 1, -1, 0)``: 0 up to ``L_max - L_cache`` tokens, -1 from ``L_max`` on.

    Args:
        num_tokens: |y|, sampled tokens, any shape.
        max_length: L_max, tokens.
        cache_length: L_cache, tokens, above 0.

    Returns:
        float64 of the same shape (arXiv 2510.13786, Section 3).
    """
    return np.clip((max_length - np.asarray(num_tokens, dtype=np.float64)) / cache_length - 1.0, -1.0, 0.0)


@register_reward_shaping(LENGTH_PENALTY)
@dataclass(frozen=True)
class LengthPenalty(RewardShaping):
    """Add `length_penalty` to the reward of responses that passed, and to no other.

    Args:
        max_length: L_max, tokens; None: ``data.max_response_length`` (the paper's 14k).
        cache_length: L_cache, tokens; None: the paper's share of ``max_length``, 2,048 of 14,336.
    """

    max_length: int | None = None
    cache_length: int | None = None

    def __post_init__(self) -> None:
        if problems := wrong_fields(self, _SECTION):
            raise ValueError("\n".join(f"{_PATH}.{problem}" for problem in problems))
        if self.max_length is not None and self.cache_length is not None and self.cache_length > self.max_length:
            raise ValueError(
                f"{_PATH}.cache_length={self.cache_length} is more than max_length={self.max_length}: every response "
                "would be penalised; lower cache_length, or raise max_length"
            )

    def lengths(self, max_response_length: int) -> tuple[int, float]:
        """L_max and L_cache, tokens, where responses have at most ``max_response_length``."""
        max_length = self.max_length if self.max_length is not None else max_response_length
        cache = self.cache_length if self.cache_length is not None else max_length * PAPER_ANSWER / PAPER_TOTAL
        return max_length, cache

    def shape(self, responses: Responses) -> NDArray[np.float64]:
        """Rewards with the penalty, [R] float64; |y| is what was sampled, without injected tokens."""
        max_length, cache = self.lengths(responses.max_length)
        penalty_R = length_penalty(responses.num_sampled_R, max_length, cache)
        return np.where(responses.passed_R, responses.rewards_R + penalty_R, responses.rewards_R)


@register_reward_shaping(EXCLUDE_TRUNCATED)
class ExcludeTruncated(RewardShaping):
    """Leave truncated responses out of the loss, of every denominator and of their group's mean.

    A KL loss or an entropy bonus would still count them: the start-up check refuses it beside this.
    """

    leaves_out: ClassVar[bool] = True

    def trains(self, responses: Responses) -> NDArray[np.bool_]:
        """False for responses that ran out of tokens, [R] bool.

        A response without a record of ours counts as truncated if it has the greatest length that is allowed.
        """
        records = (fields.get(RECORD_KEY) for fields in responses.extra_fields_R)
        truncated = [
            bool(at_limit) if record is None else bool(record["truncated"])
            for record, at_limit in zip(records, responses.at_limit_R, strict=True)
        ]
        return ~np.array(truncated, dtype=np.bool_)
