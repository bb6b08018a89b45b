# SPDX-License-Identifier: Apache-2.0
"""The length penalty and the rule for truncated responses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scalerl_verl.advantage import shaping_step as reward_shaping  # noqa: F401 - registers what the package brings
from scalerl_verl.advantage.length_penalty import length_penalty
from scalerl_verl.advantage.reward_shaping import Responses, make_reward_shapings, shape_rewards
from scalerl_verl.interruption.response import RECORD_KEY


def responses(num_sampled: list[int], rewards: list[float], **changes: Any) -> Responses:
    size = len(num_sampled)
    options: dict[str, Any] = {
        "passed_R": np.array(rewards) > 0,
        "length_R": np.array(num_sampled),
        "at_limit_R": np.zeros(size, dtype=bool),
        "extra_fields_R": [{}] * size,
    }
    return Responses(
        rewards_R=np.array(rewards),
        num_sampled_R=np.array(num_sampled),
        max_length=14_336,
        prompt_ids_R=["p"] * size,
        **{**options, **changes},
    )


def test_the_paper_s_formula() -> None:
    """L_max 14k, L_cache 2k: nothing up to 12k, then a line down to -1 at 14k."""
    lengths = [0, 11_999, 12_000, 13_000, 13_500, 14_000, 20_000]
    np.testing.assert_allclose(length_penalty(lengths, 14_000, 2_000), [0, 0, 0, -0.5, -0.75, -1, -1], atol=1e-12)


def test_only_correct_responses_are_penalised() -> None:
    shapings = make_reward_shapings({"length_penalty": {"max_length": 14_000, "cache_length": 2_000}})
    rewards, trains = shape_rewards(shapings, responses([13_000, 13_000, 100, 13_000], [1.0, -1.0, 1.0, 0.0]))
    np.testing.assert_allclose(rewards, [0.5, -1.0, 1.0, 0.0])
    assert trains.all()


def test_right_is_what_passed_whatever_was_taken_off_the_reward_before() -> None:
    shapings = make_reward_shapings({"length_penalty": {"max_length": 14_000, "cache_length": 2_000}})
    given = responses([13_000, 13_000], [-0.2, 0.3], passed_R=np.array([True, False]))
    np.testing.assert_allclose(shape_rewards(shapings, given)[0], [-0.7, 0.3])


def test_defaults_follow_the_response_length() -> None:
    shapings = make_reward_shapings({"length_penalty": {}})
    rewards, _ = shape_rewards(shapings, responses([12_288, 13_312, 14_336], [1.0, 1.0, 1.0]))
    np.testing.assert_allclose(rewards, [1.0, 0.5, 0.0])


def test_injected_tokens_do_not_count() -> None:
    """Sampled tokens are what the penalty sees, however long the response is."""
    shapings = make_reward_shapings({"length_penalty": None})
    rewards, _ = shape_rewards(shapings, responses([12_288], [1.0], length_R=np.array([14_336])))
    assert rewards[0] == 1.0


@pytest.mark.parametrize("options", [{"max_length": 0}, {"cache_length": 1.5}, {"max_length": 5, "cache_length": 6}])
def test_meaningless_lengths_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^reward_shaping\.length_penalty\."):
        make_reward_shapings({"length_penalty": options})


def test_truncated_responses_are_left_out_by_their_record_or_else_by_their_length() -> None:
    fields = [{RECORD_KEY: {"truncated": True}}, {RECORD_KEY: {"truncated": False}}, {}, {}]
    given = responses([5, 9, 9, 5], [1.0] * 4, extra_fields_R=fields, at_limit_R=np.array([False, True, True, False]))
    rewards, trains = shape_rewards(make_reward_shapings({"exclude_truncated": {}}), given)
    assert trains.tolist() == [False, True, False, True] and rewards.tolist() == [1.0] * 4
