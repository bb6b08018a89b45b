# SPDX-License-Identifier: Apache-2.0
"""Pass counts by hand, and that the order in which results arrive does not matter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_verl.curriculum import PassHistory, Visit, tally_visits


def test_latest_and_cumulative_by_hand() -> None:
    """Visits of step 1 (3 of 4) and step 5 (1 of 4): latest 1/4, all 4/8."""
    history = PassHistory()
    history.record("a", 1, 3, 4)
    history.record("a", 5, 1, 4)
    assert history.get("a") == Visit(step=5, passed=1, responses=4, all_passed=4, all_responses=8)
    assert history.get("b") is None


def test_result_of_an_earlier_step_that_arrives_late_does_not_become_the_latest() -> None:
    history = PassHistory()
    history.record("a", 5, 1, 4)
    history.record("a", 1, 3, 4)
    assert history.get("a") == Visit(step=5, passed=1, responses=4, all_passed=4, all_responses=8)


def test_duplicates_drawn_in_one_step_are_one_visit() -> None:
    history = PassHistory()
    history.record("a", 2, 4, 4)
    history.record("a", 2, 0, 4)
    assert history.get("a") == Visit(step=2, passed=4, responses=8, all_passed=4, all_responses=8)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.integers(0, 4), st.integers(4, 6))), st.data())
def test_order_of_arrival_does_not_matter(results: list[tuple[str, int, int, int]], data: st.DataObject) -> None:
    first, second = PassHistory(), PassHistory()
    for result in results:
        first.record(*result)
    for result in data.draw(st.permutations(results)):
        second.record(*result)
    assert {key: first.get(key) for key in "abc"} == {key: second.get(key) for key in "abc"}


def test_state_is_a_copy_and_comes_back_whole() -> None:
    history = PassHistory()
    history.record("a", 1, 3, 4)
    history.record("b", 2, 0, 2)
    state = history.state_dict()
    history.forget("a")
    other = PassHistory()
    other.load_state_dict(state)
    assert other.get("a") == Visit(1, 3, 4, 3, 4) and other.get("b") == Visit(2, 0, 2, 0, 2)
    assert len(other) == 2 and len(history) == 1
    other.load_state_dict(PassHistory().state_dict())
    assert len(other) == 0


@pytest.mark.parametrize(("passed", "responses"), [(0, 0), (5, 4), (-1, 4)])
def test_impossible_counts_are_refused(passed: int, responses: int) -> None:
    with pytest.raises(ValueError, match=f"{passed} of {responses} responses passed"):
        PassHistory().record("a", 1, passed, responses)


def test_batch_is_counted_by_prompt_and_step() -> None:
    """Prompt a in step 1: one passed, one did not, and a padding row; a again from step 2; b did not pass."""
    counts = tally_visits(
        ["a", "a", "a", "a", "b"],
        ["u_0_0", "u_1_0", "u_2_0", "v_0_0", "w_0_0"],
        [1, 1, 1, 2, 1],
        [True, False, True, True, False],
        [True, True, False, True, True],
    )
    assert counts == {("a", 1): (1, 2), ("a", 2): (1, 1), ("b", 1): (0, 1)}


@pytest.mark.parametrize("last_trains", [True, False])
def test_session_of_several_outputs_counts_once_by_its_last_output(last_trains: bool) -> None:
    keys, trains = ["u_0_0", "u_0_10", "u_0_9", "u_1_0", "u_2_0"], [True, last_trains, True, True, False]
    counts = tally_visits(["a"] * 5, keys, [1] * 5, [False, True, False, False, True], trains)
    assert counts == {("a", 1): (1, 2)}


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[1, 2\] rows"):
        tally_visits(["a", "b"], ["u_0_0"], [1], [True], [True])
