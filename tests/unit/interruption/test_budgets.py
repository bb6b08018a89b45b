# SPDX-License-Identifier: Apache-2.0
"""Budgets: the paper's numbers, what fits, and who draws what."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_verl.interruption.budgets import Budgets, InterruptionSettings, resolve_budgets


def test_defaults_are_the_paper_s() -> None:
    settings = InterruptionSettings()
    budgets = resolve_budgets(settings, total=12_288 + 2_048, phrase_tokens=20, grace_tokens=0)
    assert budgets == Budgets(low=10_000, high=12_000, answer=2_048, grace=0, total=14_336)
    assert settings.phrase == (
        "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"
    )  # arXiv 2510.13786, Section 2


@given(total=st.integers(1, 20_000), phrase=st.integers(1, 90), grace=st.integers(0, 9))
def test_defaults_fit_every_response_length_or_are_refused(total: int, phrase: int, grace: int) -> None:
    try:
        budgets = resolve_budgets(InterruptionSettings(), total, phrase, grace)
    except ValueError as error:
        assert total - total // 7 - phrase - grace < 1 and "data.max_response_length" in str(error)
        return
    assert 1 <= budgets.low <= budgets.high
    assert budgets.high + grace + phrase + budgets.answer <= total


def test_budgets_that_do_not_fit_are_refused_with_the_numbers() -> None:
    settings = InterruptionSettings(thinking_budget=[10, 81], answer_budget=10)
    assert resolve_budgets(settings, 100, 9, 0).high == 81
    with pytest.raises(ValueError, match=r"81, a phrase of 10 tokens and 10 for the answer do .*response_length=100"):
        resolve_budgets(settings, 100, 10, 0)
    with pytest.raises(ValueError, match="1 to complete an end marker"):
        resolve_budgets(settings, 100, 9, 1)


def test_validation_takes_its_own_and_falls_back_to_training_s() -> None:
    settings = InterruptionSettings(thinking_budget=[5, 9], answer_budget=7, val_thinking_budget=[20, 20])
    budgets = resolve_budgets(settings, 100, 3, 0, validation=True)
    assert (budgets.low, budgets.high, budgets.answer) == (20, 20, 7)
    settings = InterruptionSettings(thinking_budget=[5, 9], answer_budget=7, val_answer_budget=0)
    budgets = resolve_budgets(settings, 100, 3, 0, validation=True)
    assert (budgets.low, budgets.high, budgets.answer) == (5, 9, 0)
    with pytest.raises(ValueError, match="val_thinking_budget up to 99"):
        resolve_budgets(InterruptionSettings(val_thinking_budget=[1, 99]), 100, 3, 0, validation=True)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"thinking_budget": [0, 5]}, "thinking_budget"),
        ({"thinking_budget": [5]}, "thinking_budget"),
        ({"thinking_budget": 5}, "thinking_budget"),
        ({"thinking_budget": "10"}, "thinking_budget"),
        ({"thinking_budget": [1.5, 3]}, "thinking_budget"),
        ({"thinking_budget": [True, 3]}, "thinking_budget"),
        ({"val_thinking_budget": [6, 5]}, "val_thinking_budget"),
        ({"answer_budget": -1}, "answer_budget"),
        ({"val_answer_budget": 1.0}, "val_answer_budget"),
        ({"seed": "x"}, "seed"),
        ({"end_marker": ""}, "end_marker"),
        ({"start_marker": " "}, "start_marker"),
        ({"start_marker": "</think>"}, "start_marker"),
        ({"end_marker": "think>"}, "start_marker"),
        ({"phrase": "<think> </think>"}, "phrase"),
        ({"phrase": "no marker"}, "phrase"),
        ({"phrase": "</think></think>"}, "phrase"),
        ({"plain_text_markers": 1}, "plain_text_markers"),
    ],
)
def test_meaningless_settings_are_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=rf"^{key}="):
        InterruptionSettings(**options)


def test_draws_are_uniform_over_both_ends() -> None:
    budgets = Budgets(low=10, high=13, answer=0, grace=0, total=100)
    counts = dict.fromkeys(range(10, 14), 0)
    for session in range(4000):
        counts[budgets.draw(0, [1, 2, 3], session)] += 1
    # Four standard deviations of a binomial count.
    assert all(abs(count - 1000) < 4 * (4000 * 0.25 * 0.75) ** 0.5 for count in counts.values())


def test_draws_depend_on_prompt_session_and_seed_and_on_nothing_else() -> None:
    budgets = Budgets(low=1, high=10**9, answer=0, grace=0, total=2 * 10**9)
    same = {budgets.draw(0, [1, 23], 4), budgets.draw(0, [1, 23], 4)}
    others = {
        budgets.draw(1, [1, 23], 4),
        budgets.draw(0, [12, 3], 4),
        budgets.draw(0, [1, 23], 5),
        budgets.draw(0, [1, 23, 0], 4),
    }
    assert len(same) == 1 and len(others | same) == 5
