# SPDX-License-Identifier: Apache-2.0
"""How many groups start ahead: fewer where the trainer is the limit, no fewer where it waits; simulated and by hand."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from benchmarks.pipeline.simulator import Outcome, Rates, Simulation
from scalerl_verl.pipeline.admission import AdmissionRule
from scalerl_verl.pipeline.lead import MEMORY, WINDOW, Lead


def long_responses(rng: random.Random) -> int:
    return min(3000, max(1, int(rng.expovariate(1 / 1000))))


def simulate(rates: Rates, lead: bool, k: int = 8, draw: Callable[[random.Random], int] = long_responses) -> Outcome:
    rule = AdmissionRule(4, k)
    kept = Lead(rule) if lead else None
    return Simulation(rule, rates, "keep", 4, draw, prompt_tokens=48, seed=3, lead=kept).run(80)


def mean_age(outcome: Outcome) -> float:
    return sum(age * tokens for age, tokens in outcome.ages.items()) / sum(outcome.ages.values())


@pytest.mark.fault("tokens grow old in a queue for nothing where the trainer is the limit")
@pytest.mark.parametrize("draw", [long_responses, lambda rng: 20], ids=["long", "short and equal"])
def test_tokens_are_half_as_old_where_the_trainer_is_the_limit(draw: Callable[[random.Random], int]) -> None:
    rates = Rates(1, 128, 0.012, train_s_per_token=2e-3, update_s=0.15, pause_s=0.017)
    full, adaptive = simulate(rates, False, draw=draw), simulate(rates, True, draw=draw)
    assert full.trainer_idle < 0.05, "the trainer is the limit"
    assert adaptive.tokens_per_s > 0.99 * full.tokens_per_s
    assert mean_age(adaptive) < 0.5 * mean_age(full) and max(adaptive.ages) <= 8


def test_nothing_changes_where_generation_is_the_limit() -> None:
    rates = Rates(1, 128, 0.012, train_s_per_token=1.5e-4, update_s=0.15, pause_s=0.017)
    full, adaptive = simulate(rates, False), simulate(rates, True)
    assert full.trainer_idle > 0.3 and adaptive == full


@pytest.mark.parametrize("k", [0, 1])
def test_one_batch_that_trains_and_one_that_is_generated_are_the_least(k: int) -> None:
    lead = Lead(AdmissionRule(4, k))
    for version in range(100):
        lead.note_batch(version, version, num_over=4 * k, short=0.0, waited=0.0)
    assert lead.groups == 4 * (k + 1) and lead.batches == k


def after_a_quiet_time(num_over: int = 20, **changes: float) -> Lead:
    """A lead of a rule of 4 groups and k = 8 after the window that follows the first batches."""
    lead = Lead(AdmissionRule(4, 8))
    lead.note_batch(0, 0, num_over, 0.0, 0.0)
    for version in range(1, WINDOW + 1):
        lead.note_batch(version, version, num_over, **{"short": 0.0, "waited": 0.0, **changes})
    return lead


def test_lead_comes_down_by_what_was_left_over_every_time() -> None:
    assert after_a_quiet_time().groups == 36 - (20 - 1)
    assert after_a_quiet_time(num_over=1).groups == 36, "a margin stays"
    assert after_a_quiet_time(num_over=36).groups == 8
    assert after_a_quiet_time(waited=0.1).groups == 36, "who waits for a straggler has no groups too many"


def test_groups_of_another_lead_say_nothing() -> None:
    lead = after_a_quiet_time()
    for version in range(WINDOW + 1, 3 * WINDOW):
        lead.note_batch(version, oldest=WINDOW - 1, num_over=15, short=0.0, waited=0.0)
    assert lead.groups == 17


def test_trainer_that_waits_gets_more_at_once_and_the_place_is_remembered() -> None:
    lead = after_a_quiet_time()
    lead.note_batch(7, 7, num_over=-2, short=0.01, waited=0.01)
    assert lead.groups == 17, "a moment is no wait"
    lead.note_batch(8, 3, num_over=-2, short=0.5, waited=0.5)
    raised = lead.groups
    assert raised == 26, "by the share of the step in which data were missing"
    for version in range(9, 8 + MEMORY):
        lead.note_batch(version, version, num_over=20, short=0.0, waited=0.0)
    assert lead.groups == 18, "not again as low as where data were missing"
    for version in range(8 + MEMORY, 9 + 2 * MEMORY):
        lead.note_batch(version, version, num_over=8, short=0.0, waited=0.0)
    assert lead.groups < 17, "but not for ever"
    lead.note_batch(99, 99, num_over=-4, short=1.0, waited=1.0)
    lead.note_batch(100, 99, num_over=-4, short=1.0, waited=1.0)
    lead.note_batch(101, 99, num_over=-4, short=1.0, waited=1.0)
    assert lead.groups == 36, "never beyond the bound"
