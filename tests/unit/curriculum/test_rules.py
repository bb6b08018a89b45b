# SPDX-License-Identifier: Apache-2.0
"""What is mastered, and the floor."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_verl.curriculum import PassHistory, ResamplingRules, choose_drops


def make_history(**visits: list[tuple[int, int, int]]) -> PassHistory:
    history = PassHistory()
    for prompt_id, records in visits.items():
        for record in records:
            history.record(prompt_id, *record)
    return history


def names(prompts: list[Any]) -> list[str]:
    return [prompt.prompt_id for prompt in prompts]


def test_rate_of_exactly_the_threshold_is_mastered() -> None:
    """9 of 10 and 27 of 30 are 0.9; 14 of 16 is not."""
    history = make_history(a=[(1, 9, 10)], b=[(1, 27, 30)], c=[(1, 14, 16)], d=[(1, 15, 16)])
    leaving, kept = choose_drops("abcde", history, ResamplingRules())
    assert names(leaving) == ["d", "a", "b"] and kept == []


def test_latest_and_cumulative_differ() -> None:
    """a: 0/4 then 4/4; b: 4/4 then 0/4; c: 18/20 then 8/10 (26/30 < 0.9); d: 19/20 then 8/10 (27/30 = 0.9)."""
    history = make_history(
        a=[(1, 0, 4), (2, 4, 4)],
        b=[(1, 4, 4), (2, 0, 4)],
        c=[(1, 18, 20), (2, 8, 10)],
        d=[(1, 19, 20), (2, 8, 10)],
    )
    assert names(choose_drops("abcd", history, ResamplingRules())[0]) == ["a"]
    leaving, _ = choose_drops("abcd", history, ResamplingRules(history="cumulative"))
    assert names(leaving) == ["d"] and (leaving[0].passed, leaving[0].responses, leaving[0].step) == (27, 30, 2)


def test_floor_keeps_the_lowest_rate_then_the_least_recent_then_by_id() -> None:
    history = make_history(a=[(3, 10, 10)], b=[(1, 9, 10)], c=[(2, 10, 10)], d=[(3, 10, 10)], e=[(4, 0, 10)])
    rules = ResamplingRules(min_prompts=4)
    leaving, kept = choose_drops("edcba", history, rules)
    assert names(leaving) == ["a"] and names(kept) == ["d", "c", "b"]
    assert names(choose_drops("abcde", history, ResamplingRules(min_prompts=9))[0]) == []


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=1),
    st.integers(1, 10),
    st.data(),
)
def test_floor_holds_and_order_does_not_matter(
    visits: dict[str, tuple[int, int]], floor: int, data: st.DataObject
) -> None:
    history = make_history(**{key: [(step, passed, 4)] for key, (step, passed) in visits.items()})
    rules = ResamplingRules(min_prompts=floor)
    result = choose_drops("abcdefgh", history, rules)
    leaving, kept = result
    assert 8 - len(leaving) >= min(floor, 8)
    assert {prompt.prompt_id for prompt in leaving + kept} == {
        key for key, (_, passed) in visits.items() if passed == 4
    }
    assert not kept or 8 - len(leaving) == floor or not leaving
    assert choose_drops(data.draw(st.permutations("abcdefgh")), history, rules) == result


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"threshold": 0}, "threshold=0: give a number above 0"),
        ({"threshold": 1.5}, "threshold=1.5"),
        ({"threshold": "0.9"}, "threshold='0.9'"),
        ({"threshold": float("nan")}, "threshold=nan"),
        ({"history": "mean"}, "history='mean': use one of latest, cumulative"),
        ({"first_epoch": 1}, "first_epoch=1: give a whole number of 2 or more"),
        ({"min_prompts": 0}, "min_prompts=0"),
        ({"min_prompts": True}, "min_prompts=True"),
        ({"readmit_after_epochs": 0}, "readmit_after_epochs=0: give a whole number of 1 or more, or null"),
    ],
)
def test_rules_that_cannot_be_are_refused(arguments: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ValueError) as error:
        ResamplingRules(**arguments)
    assert fragment in str(error.value)


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(ValueError) as error:
        ResamplingRules(threshold=2, history="best", first_epoch=0)
    assert len(str(error.value).splitlines()) == 3
