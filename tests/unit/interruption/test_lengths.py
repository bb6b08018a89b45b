# SPDX-License-Identifier: Apache-2.0
"""Statistics of lengths, and the truncation alarm."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from verl.trainer.ppo.v1.utils import MetricsAggregator

from scalerl_verl.interruption.lengths import AlarmSettings, TruncationAlarm, summarize_records, summarize_truncation
from scalerl_verl.interruption.response import LengthRecord


def record(outcome: str, thinking: int = 10, answer: int = 2, injected: int = 0, **changes: Any) -> dict[str, Any]:
    return LengthRecord(outcome, False, thinking, answer, injected, thinking_budget=10, **changes).as_dict()


def test_outcomes_lengths_and_rewards() -> None:
    records = [
        record("interrupted", 10, 1, 5, continued_tokens=100, cached_tokens=96),
        record("interrupted", 20, 3, 5, continued_tokens=100, cached_tokens=64),
        record("natural", 4, 6),
        record("unclosed", 9, 0),
        record("no_thinking", 0, 7),
    ]
    found = summarize_records(records, np.array([1.0, -1.0, 1.0, -1.0, -1.0]))
    assert found == {
        "interrupted_fraction": 0.4,
        "natural_close_fraction": 0.2,
        "unclosed_fraction": 0.2,
        "no_thinking_fraction": 0.2,
        "thinking_tokens_mean": pytest.approx(43 / 5),
        "answer_tokens_mean": pytest.approx(17 / 5),
        "injected_tokens_sum": 10.0,
        "reward_interrupted_mean": 0.0,
        "reward_natural_mean": 1.0,
        "continuation_cached_fraction": pytest.approx(0.8),
    }


def test_means_over_nothing_are_left_out() -> None:
    found = summarize_records([record("natural")], np.array([1.0]))
    assert "reward_interrupted_mean" not in found and "continuation_cached_fraction" not in found
    assert summarize_records([], np.array([])) == {} == summarize_truncation(np.array([], dtype=bool), [])


def test_truncation_by_prompt() -> None:
    truncated = np.array([True, False, False, False, True, True])
    found = summarize_truncation(truncated, ["a", "a", "b", "b", "c", "c"])
    assert found == {
        "truncated_fraction": 0.5,
        "prompts_truncated_fraction": pytest.approx(2 / 3),
        "truncated_fraction_prompt_max": 1.0,
    }


def test_verl_combines_the_mini_batches_of_a_step_as_meant() -> None:
    """By words in the names: a name that happens to hold "min" or "sum" would be combined wrongly."""
    records = [record("interrupted", continued_tokens=1), record("natural"), record("unclosed"), record("no_thinking")]
    names = {
        **summarize_truncation(np.array([True]), ["a"]),
        **summarize_records(records, np.ones(4)),
        "truncated_window_fraction": 0.0,
        "truncation_alarm_max": 0.0,
    }
    for name in names:
        expected = next((kind for kind in ("max", "sum") if name.endswith(f"_{kind}")), "weighted_avg")
        assert MetricsAggregator()._get_aggregation_type(f"scalerl/length/{name}") == expected, name


def test_the_alarm_needs_a_full_window_above_its_fraction() -> None:
    alarm = TruncationAlarm(AlarmSettings(fraction=0.1, window_batches=3))
    assert [alarm.observe(count, 10) for count in (9, 0)] == [False, False] and not alarm.raised
    assert alarm.observe(0, 10) and alarm.raised and alarm.fraction == pytest.approx(0.3)
    assert "30.0%" in alarm.message() and "exclude_truncated" in alarm.message()
    # Raised once, until it has been down; exactly the fraction is not above it.
    assert not alarm.observe(2, 10) and not alarm.raised
    assert [alarm.observe(count, 10) for count in (1, 0)] == [False, False] and not alarm.raised
    assert alarm.fraction == pytest.approx(0.1)
    assert alarm.observe(3, 10) and not alarm.observe(3, 10) and alarm.raised


def test_batches_count_by_their_responses() -> None:
    alarm = TruncationAlarm(AlarmSettings(fraction=0.1, window_batches=2))
    alarm.observe(1, 1)
    alarm.observe(0, 99)
    assert alarm.fraction == pytest.approx(0.01) and not alarm.raised


def test_window_goes_on_from_its_state_in_an_alarm_of_any_size() -> None:
    alarm = TruncationAlarm(AlarmSettings(fraction=0.1, window_batches=3))
    for count in (0, 1, 5):
        alarm.observe(count, 10)
    state = json.loads(json.dumps(alarm.state_dict()))
    for window, batches in (3, [[0, 10], [1, 10], [5, 10]]), (2, [[1, 10], [5, 10]]), (9, state["batches"]):
        resumed = TruncationAlarm(AlarmSettings(fraction=0.1, window_batches=window))
        resumed.observe(7, 7)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == {"batches": batches}
    assert resumed.fraction == alarm.fraction and not resumed.raised, "nine batches were not seen yet"


def test_alarm_that_was_up_is_raised_anew_after_a_restart() -> None:
    alarm = TruncationAlarm(AlarmSettings(fraction=0.1, window_batches=2))
    assert [alarm.observe(5, 10) for _ in range(3)] == [False, True, False]
    resumed = TruncationAlarm(alarm.settings)
    resumed.load_state_dict(alarm.state_dict())
    assert [resumed.observe(5, 10) for _ in range(2)] == [True, False]


@pytest.mark.parametrize(
    "state",
    [{}, {"batches": 3}, {"batches": [[1]]}, {"batches": [[3, 2]]}, {"batches": [[-1, 2]]}, {"batches": [[0.5, 2]]},
     {"batches": [], "more": 1}],
)  # fmt: skip
def test_something_else_than_a_window_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is no window of a truncation alarm"):
        TruncationAlarm(AlarmSettings()).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"fraction": 0}, "fraction"),
        ({"fraction": 10}, "fraction"),
        ({"fraction": True}, "fraction"),
        ({"window_batches": 0}, "window_batches"),
        ({"window_batches": 2.0}, "window_batches"),
        ({"on_alarm": "halt"}, "on_alarm"),
    ],
)
def test_meaningless_alarms_are_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=rf"^{key}="):
        AlarmSettings(**options)
