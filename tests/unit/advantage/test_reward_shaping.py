# SPDX-License-Identifier: Apache-2.0
"""The extension point for length penalties and truncation rules: registration, options, order, refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from scalerl_verl.advantage import reward_shaping
from scalerl_verl.advantage.reward_shaping import (
    Responses,
    RewardShaping,
    make_reward_shapings,
    register_reward_shaping,
    shape_rewards,
)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        reward_shaping,
        "_REGISTRY",
        {"scale": Scale, "needs": Needs, "leave_out_cut": LeaveOutCut, "nothing": RewardShaping},
    )


@dataclass(frozen=True)
class Scale(RewardShaping):
    factor: float = 2.0

    def __post_init__(self) -> None:
        if self.factor <= 0:
            raise ValueError(f"reward_shaping.scale.factor={self.factor} must be above 0")

    def shape(self, responses: Responses) -> np.ndarray:
        return self.factor * responses.rewards_R


@dataclass(frozen=True)
class Needs(RewardShaping):
    amount: float
    count: int | None = None
    on: bool = True
    steps: tuple[int, ...] = ()


class LeaveOutCut(RewardShaping):
    leaves_out: ClassVar[bool] = True

    def trains(self, responses: Responses) -> np.ndarray:
        return ~responses.at_limit_R


def three_responses() -> Responses:
    return Responses(
        rewards_R=np.array([1.0, -1.0, 1.0]),
        passed_R=np.array([True, False, True]),
        num_sampled_R=np.array([3, 8, 5]),
        length_R=np.array([4, 8, 6]),
        at_limit_R=np.array([False, True, False]),
        max_length=8,
        prompt_ids_R=["a", "a", "b"],
        extra_fields_R=[{}, {}, {}],
    )


def test_no_section_changes_nothing() -> None:
    for section in (None, {}):
        assert make_reward_shapings(section) == {}
    for shapings in ({}, make_reward_shapings({"nothing": None})):
        rewards_R, trains_R = shape_rewards(shapings, three_responses())
        assert rewards_R.tolist() == [1.0, -1.0, 1.0] and trains_R.all()


def test_shapings_apply_in_order_with_their_options() -> None:
    @register_reward_shaping("add_one")
    class AddOne(RewardShaping):
        def shape(self, responses: Responses) -> np.ndarray:
            return responses.rewards_R + 1

    first = make_reward_shapings({"scale": {"factor": 3.0}, "add_one": {}, "leave_out_cut": {}})
    rewards_R, trains_R = shape_rewards(first, three_responses())
    assert rewards_R.tolist() == [4.0, -2.0, 4.0] and trains_R.tolist() == [True, False, True]
    second = make_reward_shapings({"add_one": None, "scale": None})
    assert shape_rewards(second, three_responses())[0].tolist() == [4.0, 0.0, 4.0]


@pytest.mark.parametrize(
    ("section", "match"),
    [
        (
            {"length_penalti": {}},
            r"reward_shaping\.length_penalti does not exist; the names are: leave_out_cut, needs, nothing",
        ),
        ({"scale": {"by": 2}}, r"reward_shaping\.scale\.by does not exist; the options are: factor"),
        ({"leave_out_cut": {"by": 2}}, r"leave_out_cut\.by does not exist; the options are: none"),
        ({"scale": {"factor": 0}}, r"reward_shaping\.scale\.factor=0 must be above 0"),
        ({"scale": {"factor": "2"}}, r"reward_shaping\.scale\.factor='2' must be a number"),
        ({"scale": {"factor": True}}, r"reward_shaping\.scale\.factor=True must be a number"),
        ({"needs": None}, r"reward_shaping\.needs\.amount is missing and has no default"),
        ({"needs": {"amount": None}}, r"reward_shaping\.needs\.amount=None must be a number"),
        ({"needs": {"amount": 1, "count": 2.5}}, r"needs\.count=2\.5 must be a whole number or null"),
        ({"needs": {"amount": 1, "on": "yes"}}, r"needs\.on='yes' must be True or False"),
        ({"scale": 2.0}, r"reward_shaping\.scale=2\.0 must be a section"),
        ("scale", r"reward_shaping='scale' must map names to their options"),
    ],
)
def test_what_cannot_be_is_refused(section: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_reward_shapings(section)


def test_whole_numbers_and_null_stand_where_a_field_takes_them() -> None:
    made = make_reward_shapings({"needs": {"amount": 1, "count": None, "on": False, "steps": (1, 2)}})
    assert made == {"needs": Needs(1.0, None, False, (1, 2))}


def test_name_of_another_class_is_refused() -> None:
    assert register_reward_shaping("scale")(Scale) is Scale
    with pytest.raises(ValueError, match="'scale' is Scale already"):
        register_reward_shaping("scale")(LeaveOutCut)


class Undeclared(RewardShaping):
    def trains(self, responses: Responses) -> np.ndarray:
        return ~responses.at_limit_R


class WrongShape(RewardShaping):
    def shape(self, responses: Responses) -> np.ndarray:
        return responses.rewards_R[:1]


class NonFinite(RewardShaping):
    def shape(self, responses: Responses) -> np.ndarray:
        return responses.rewards_R / np.where(responses.at_limit_R, np.inf, np.nan)


@pytest.mark.parametrize(
    ("shaping", "match"),
    [(Undeclared(), "set leaves_out = True"), (WrongShape(), "one value per response"), (NonFinite(), "non-finite")],
)
def test_shaping_that_breaks_the_batch_is_refused(shaping: RewardShaping, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        shape_rewards({"mine": shaping}, three_responses())
