# SPDX-License-Identifier: Apache-2.0
"""Visits of a prompt: how many responses judge it, and what differs from one to the next."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from scalerl_verl.curriculum import PassHistory, ResamplingRules, choose_drops
from scalerl_verl.curriculum import settings as curriculum_settings
from scalerl_verl.interruption import verl as agent_loop
from scalerl_verl.interruption.budgets import Budgets
from scalerl_verl.interruption.verl import response_context
from tests.unit.composed import changed

BUDGETS = Budgets(low=10_000, high=12_000, answer=2_048, grace=0, total=14_336)


def dropped(counts: dict[str, tuple[int, int]], rules: ResamplingRules) -> list[str]:
    history = PassHistory()
    for prompt, (passed, responses) in counts.items():
        history.record(prompt, 1, passed, responses)
    return [prompt.prompt_id for prompt in choose_drops([*counts, "other"], history, rules)[0]]


def test_one_surviving_response_does_not_drop_its_prompt() -> None:
    counts = {"one of 16 survived": (1, 1), "7": (7, 7), "8": (8, 8), "15 of 16": (15, 16), "14 of 16": (14, 16)}
    assert dropped(counts, ResamplingRules(min_responses=8)) == ["8", "15 of 16"]


def test_cumulative_history_judges_by_all_responses() -> None:
    history = PassHistory()
    for step in range(8):
        history.record("a", step, 1, 1)
    rules = {name: ResamplingRules(history=name, min_responses=8) for name in ("latest", "cumulative")}
    found = {kind: [p.prompt_id for p in choose_drops(["a", "b"], history, rule)[0]] for kind, rule in rules.items()}
    assert found == {"latest": [], "cumulative": ["a"]}


@pytest.mark.parametrize(("group", "needed"), [(16, 8), (5, 3), (2, 1)])
def test_half_a_group_judges_unless_told_otherwise(group: int, needed: int) -> None:
    config = changed("curriculum", {"actor_rollout_ref.rollout.n": group})
    curriculum_settings.complete(config)
    assert config.data.sampler.min_responses == needed
    given = changed("curriculum", {"actor_rollout_ref.rollout.n": group, "data.sampler.min_responses": 1})
    curriculum_settings.complete(given)
    assert given.data.sampler.min_responses == 1
    assert curriculum_settings.read_rules(dict(given.data.sampler)).min_responses == 1


def draw(step: int, validate: bool = False) -> list[int]:
    """Budgets of 16 responses to one prompt that was handed out in a step, as the agent loop draws them."""
    worker = SimpleNamespace(model_config=SimpleNamespace(generation_config=None))
    with response_context(worker, {"validate": validate, "step": step}):
        context = agent_loop._context.get()
    assert context is not None
    return [BUDGETS.draw(0, [1, 2, 3], session, context.step) for session in range(16)]


def test_the_position_of_an_interruption_differs_from_visit_to_visit() -> None:
    """An epoch later 16 of 16 positions would be the same; of 2,001 values two equal ones are rare."""
    first, second = draw(3), draw(131)
    assert sum(a == b for a, b in zip(first, second, strict=True)) <= 1
    assert all(BUDGETS.low <= budget <= BUDGETS.high for budget in first + second)


def test_a_step_that_is_repeated_draws_the_same() -> None:
    assert draw(3) == draw(3)


def test_validations_draw_the_same_in_every_step() -> None:
    assert draw(0, validate=True) == draw(100, validate=True)
