# SPDX-License-Identifier: Apache-2.0
"""Options that would do nothing, or something else than they say, are refused with the key to change."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl_verl.config.checks import find_problems
from tests.unit.composed import ACTOR, changed, check_refusal

PENALTY = "algorithm.scalerl.reward_shaping.length_penalty"
NORM = {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}

REFUSALS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "a cap below 1": (
        "recipe",
        {f"{ACTOR}.policy_loss.eps_max": 0.2},
        [f"{ACTOR}.policy_loss.eps_max=0.2", "set it to"],
    ),
    "a penalty that begins beyond the longest response": (
        "recipe",
        {"data.max_response_length": 14336, PENALTY: {"max_length": 20000, "cache_length": 2000}},
        ["max_length=20000 less cache_length=2000", "data.max_response_length=14336", f"set {PENALTY}.max_length to"],
    ),
    "a sum divided by the width of each micro-batch": (
        "recipe",
        NORM,
        [f"{ACTOR}.loss_scale_factor=null", "'${data.max_response_length}'"],
    ),
    "more responses than a visit has": (
        "recipe",
        {"data.sampler.min_responses": 17},
        ["data.sampler.min_responses=17 is more than the actor_rollout_ref.rollout.n=16", "set it to 16 or less"],
    ),
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_option_without_effect_is_refused_with_its_key(fault: str) -> None:
    check_refusal(*REFUSALS[fault])


@pytest.mark.parametrize(
    "changes",
    [
        {f"{ACTOR}.policy_loss.eps_max": 1.0},
        {"data.max_response_length": 14336, PENALTY: {"max_length": 16000, "cache_length": 2000}},
        {"data.max_response_length": 14336, PENALTY: None, "algorithm.scalerl.reward_shaping": {"length_penalty": {}}},
        {**NORM, f"{ACTOR}.loss_scale_factor": 14336},
        {"data.sampler.min_responses": 17, "data.sampler.history": "cumulative"},
    ],
)
def test_the_same_options_where_they_act_are_accepted(changes: dict[str, Any]) -> None:
    changes = {key: value for key, value in changes.items() if value is not None}
    assert find_problems(changed("recipe", changes)) == []
