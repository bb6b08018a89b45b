# SPDX-License-Identifier: Apache-2.0
"""The staleness bound as an invariant: random schedules, failures and restarts, against the simulator and by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.pipeline.simulator import Outcome, Rates, Simulation
from scalerl_verl.pipeline import AdmissionRule
from scalerl_verl.pipeline.lead import Lead

KINDS_OF_LENGTHS = {
    "equal": lambda rng: 20,
    "uniform": lambda rng: rng.randint(1, 60),
    "heavy": lambda rng: min(2000, int(rng.paretovariate(0.8) * 5)),
    "two": lambda rng: rng.choice([1, 400]),
}


def simulate(k: int, way: str = "keep", num_steps: int = 12, **changes: object) -> Outcome:
    arguments: dict = {
        "rates": Rates(num_replicas=2, slots=4, step_s=0.01, train_s_per_token=1e-3, update_s=0.05, pause_s=0.01),
        "group_size": 3,
        "lengths": "heavy",
        "seed": 0,
        "batch_groups": 4,
        "fail_probability": 0.0,
        **changes,
    }
    rule = AdmissionRule(arguments.pop("batch_groups"), k)
    draw = KINDS_OF_LENGTHS[arguments.pop("lengths")]
    arguments["lead"] = Lead(rule) if arguments.pop("adaptive", False) else None
    return Simulation(rule, way=way, draw_length=draw, **arguments).run(num_steps)


@pytest.mark.fault("a staleness bound of 0 or 1 that is off by one")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    k=st.integers(0, 9),
    batch_groups=st.integers(1, 6),
    group_size=st.integers(1, 4),
    replicas=st.integers(1, 4),
    slots=st.integers(1, 16),
    train_s=st.sampled_from([0.0, 1e-4, 1e-2, 1.0]),
    update_s=st.sampled_from([0.0, 0.1, 5.0]),
    way=st.sampled_from(["keep", "recompute", "abort"]),
    lengths=st.sampled_from(sorted(KINDS_OF_LENGTHS)),
    fail_probability=st.sampled_from([0.0, 0.1, 0.6]),
    reject_probability=st.sampled_from([0.0, 0.1, 0.6]),
    adaptive=st.booleans(),
    num_steps=st.sampled_from([8, 24]),
    seed=st.integers(0, 10**6),
)
def test_no_trained_token_is_older_than_k_and_nothing_deadlocks(
    k,
    batch_groups,
    group_size,
    replicas,
    slots,
    train_s,
    update_s,
    way,
    lengths,
    fail_probability,
    reject_probability,
    adaptive,
    num_steps,
    seed,
) -> None:
    rates = Rates(replicas, slots, 0.01, 0.0, train_s, update_s, pause_s=0.01, resume_s=0.2, prefill_tokens_per_s=1e4)
    outcome = simulate(
        k, way, num_steps, rates=rates, batch_groups=batch_groups, group_size=group_size, lengths=lengths, seed=seed,
        fail_probability=fail_probability, reject_probability=reject_probability, adaptive=adaptive,
    )  # fmt: skip
    assert max(outcome.ages) <= k and min(outcome.ages) >= 0
    assert len(set(outcome.trained_groups)) == len(outcome.trained_groups) == num_steps * batch_groups
    if not fail_probability and not reject_probability:
        assert outcome.wasted_tokens == 0, "every generated token is trained"
        assert sorted(outcome.trained_groups) == list(range(num_steps * batch_groups)), "no prompt is skipped"


@pytest.mark.fault("resuming from a checkpoint skips or repeats prompts")
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_reachable_state_fulfils_the_inequality(data: st.DataObject) -> None:
    """Starts, ends, restarts, losses and rejections in any order that the rule allows, and resumptions under others."""
    k, batch_groups = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 3))
    rule = AdmissionRule(batch_groups, k)
    running: dict[int, int] = {}
    finished: dict[int, int] = {}
    version = next_group = 0
    for _ in range(data.draw(st.integers(1, 60))):
        actions = ["admit", "finish", "restart", "lose", "reject", "train", "resume"]
        action = data.draw(st.sampled_from(actions))
        if action == "admit":
            for _ in range(data.draw(st.integers(0, rule.num_to_admit(len(running) + len(finished))))):
                running[next_group] = version
                next_group += 1
        elif action == "finish" and running:
            group = data.draw(st.sampled_from(sorted(running)))
            finished[group] = running.pop(group)
        elif action == "restart" and running:
            running[data.draw(st.sampled_from(sorted(running)))] = version
        elif action == "lose" and running:
            del running[data.draw(st.sampled_from(sorted(running)))]
        elif action == "reject" and finished:
            alike = data.draw(st.sets(st.sampled_from(sorted(finished))))
            finished = {group: start for group, start in finished.items() if group not in alike}
            num_open = len(running) + len(finished)
            assert rule.num_to_admit(num_open) >= batch_groups - num_open, "others can start in their place"
        elif action == "train":
            batch = rule.select(version, finished, running.values())
            if batch is None:
                continue
            assert len(batch) == batch_groups
            assert all(version - finished.pop(group) <= k for group in batch)
            version += 1
        elif action == "resume":
            assert rule.keep(version, finished) == set(finished), "the same settings lose nothing"
            k, batch_groups = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 3))
            rule = AdmissionRule(batch_groups, k)
            kept = rule.keep(version, finished)
            for group in finished.keys() - kept:
                more = Counter(finished[other] for other in {*kept, group})
                assert not rule.holds(version, more), "no group is generated again that could train"
            again = [*(finished.keys() - kept), *running]
            finished = {group: finished[group] for group in kept}
            running = dict.fromkeys(again[: rule.num_to_admit(len(finished))], version)
        assert rule.holds(version, Counter([*running.values(), *finished.values()]))
    if len(running) + len(finished) >= batch_groups:
        assert rule.select(version, {**running, **finished}, []), "once everything has finished, the trainer goes on"


def test_k_0_is_exactly_on_policy() -> None:
    assert set(simulate(0).ages) == {0}


@pytest.mark.fault("a staleness bound of 0 or 1 that is off by one")
def test_the_bound_is_reached_and_not_one_less() -> None:
    """A bound that is off by one would show as k - 1 here."""
    slow_trainer = Rates(num_replicas=1, slots=64, step_s=0.001, train_s_per_token=1.0)
    for k in (1, 2, 8):
        assert max(simulate(k, num_steps=30, rates=slow_trainer).ages) == k


def test_a_straggler_that_would_become_too_old_is_waited_for() -> None:
    rule = AdmissionRule(batch_groups=2, max_staleness=1)
    finished = {"a": 0, "b": 0, "c": 0}
    assert rule.select(0, finished, running=[0]) == ["a", "b"], "the straggler can still train with version 1"
    assert rule.select(1, {"c": 0, "e": 1, "f": 1}, running=[0]) is None, "at version 2 it would be too old"
    assert rule.select(1, {"c": 0, "d": 0, "e": 1}, running=[1]) == ["c", "d"]


def test_the_oldest_train_first() -> None:
    rule = AdmissionRule(batch_groups=1, max_staleness=3)
    assert rule.select(3, {"young": 3, "old": 1, "older": 0}, running=[]) == ["older"]


def test_data_that_broke_the_rule_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="not admitted by this rule"):
        AdmissionRule(batch_groups=1, max_staleness=0).select(1, {"old": 0}, running=[])


def test_no_group_starts_for_a_step_that_will_not_come() -> None:
    rule = AdmissionRule(batch_groups=4, max_staleness=3)
    assert rule.num_to_admit(0) == 16
    assert rule.num_to_admit(0, num_steps_left=2) == 8
    assert rule.num_to_admit(7, num_steps_left=1) == 0


@pytest.mark.parametrize("arguments", [(0, 0), (1, -1)])
def test_values_without_a_meaning_are_refused(arguments: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="or more"):
        AdmissionRule(*arguments)


def test_staleness_buys_throughput_and_keeping_beats_aborting() -> None:
    """The order the simulator exists to predict: generation-bound, uneven responses, frequent updates."""
    rates = Rates(
        num_replicas=2, slots=8, step_s=0.01, train_s_per_token=2e-4, update_s=0.1, pause_s=0.01, resume_s=1.0,
        prefill_tokens_per_s=2e3,
    )  # fmt: skip
    done = {
        (way, k): simulate(k, way, 30, rates=rates, prompt_tokens=50)
        for way, k in [("keep", 4), ("keep", 0), ("recompute", 4), ("abort", 4), ("sync", 0)]
    }
    speed = {key: outcome.tokens_per_s for key, outcome in done.items()}
    assert speed["keep", 4] > speed["recompute", 4] > speed["abort", 4]
    assert speed["keep", 4] > speed["keep", 0] >= speed["sync", 0]
    assert done["keep", 4].prefilled_again == 0 < done["abort", 4].prefilled_again


def test_speed_equals_the_rates_where_arithmetic_can_tell() -> None:
    """One replica, equal lengths, a trainer that costs nothing: 4 groups x 3 in 12 slots, 20 tokens at 10 ms each."""
    outcome = simulate(0, "sync", 5, rates=Rates(1, 12, 0.01, 0.0, 0.0), lengths="equal")
    assert outcome.seconds == pytest.approx(5 * 20 * 0.01)
    assert outcome.trained_tokens == 5 * 12 * 20
    assert outcome.generator_idle == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    "changes", [{"way": "hope"}, {"way": "sync", "k": 1}, {"fail_probability": 1.0}, {"reject_probability": 1.0}]
)
def test_simulations_without_a_meaning_are_refused(changes: dict) -> None:
    with pytest.raises(ValueError):
        simulate(**{"k": 0, **changes})


def test_rates_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        Rates(slots=0)


def test_aborted_requests_leave_their_slots_to_new_ones() -> None:
    """By hand, one slot, 1 s a response, no time for training: response 0 ends at 1 s. The update sends 1 away until
    2 s; 2, admitted then, runs until 2 s in its place; 1 ends at 3 s, and 2 trains right after it."""
    rates = Rates(1, slots=1, step_s=0.1, train_s_per_token=0.0, resume_s=1.0)
    outcome = Simulation(AdmissionRule(1, 1), rates, "abort", 1, lambda rng: 10).run(3)
    assert outcome.trained_groups == [0, 1, 2]
    assert outcome.seconds == pytest.approx(3.0)


def test_aborted_requests_go_on_where_they_were_and_are_prefilled_again() -> None:
    """By hand, two slots: 0 (10 tokens) ends at 1 s; 1 (20) has 10 by then, comes back at 2 s, waits 0.2 s for its
    prompt and 10 tokens (100 a second) and ends at 3.2 s."""
    lengths = iter([10, 20, 1])
    rates = Rates(1, slots=2, step_s=0.1, train_s_per_token=0.0, resume_s=1.0, prefill_tokens_per_s=100)
    outcome = Simulation(AdmissionRule(1, 1), rates, "abort", 1, lambda rng: next(lengths), prompt_tokens=10).run(2)
    assert outcome.prefilled_again == 20
    assert outcome.seconds == pytest.approx(3.2)
    assert outcome.ages == {0: 20, 1: 10}
