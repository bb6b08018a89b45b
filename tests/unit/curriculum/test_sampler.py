# SPDX-License-Identifier: Apache-2.0
"""Draws over epochs, and that an interrupted run draws what an uninterrupted one draws (through torchdata's loader)."""

from __future__ import annotations

import copy
import io
import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from scalerl_verl.curriculum import EpochChange, NoPositiveResampling, ResamplingRules


def make_base(num_rows: int, shuffle: bool = True, seed: int = 0) -> Any:
    """As verl's create_rl_sampler."""
    rows = range(num_rows)
    return RandomSampler(rows, generator=torch.Generator().manual_seed(seed)) if shuffle else SequentialSampler(rows)


@dataclass
class Recorder:
    """Observer that keeps what it is told."""

    changes: list[EpochChange] = field(default_factory=list)
    resumed_at: list[int] = field(default_factory=list)

    def epoch_began(self, change: EpochChange) -> None:
        self.changes.append(change)

    def resumed(self, epoch: int) -> None:
        self.resumed_at.append(epoch)


def draw_epoch(sampler: NoPositiveResampling) -> list[int]:
    return list(iter(sampler))


def test_second_epoch_leaves_out_what_passed_in_the_first() -> None:
    recorder = Recorder()
    sampler = NoPositiveResampling(make_base(4, shuffle=False), list("abcd"), ResamplingRules(), recorder)
    assert draw_epoch(sampler) == [0, 1, 2, 3]
    for prompt_id, passed in {"a": 4, "b": 3, "c": 4}.items():
        sampler.history.record(prompt_id, 1, passed, 4)
    assert draw_epoch(sampler) == [1, 3]
    assert (sampler.epoch, len(sampler), sampler.num_remaining, sampler.num_dropped) == (2, 2, 2, 2)
    assert sampler.num_dropped_this_epoch == 2
    assert draw_epoch(sampler) == [1, 3]
    assert (sampler.num_dropped_this_epoch, sampler.num_dropped) == (0, 2)
    change = recorder.changes[1]
    assert [prompt.prompt_id for prompt in change.dropped] == ["a", "c"]
    assert (change.epoch, change.num_remaining, change.num_dropped) == (2, 2, 2)


def test_dropped_prompt_stays_away_even_if_a_late_result_was_wrong() -> None:
    sampler = NoPositiveResampling(make_base(2, shuffle=False), list("ab"), ResamplingRules())
    draw_epoch(sampler)
    sampler.history.record("a", 1, 4, 4)
    assert draw_epoch(sampler) == [1]
    sampler.history.record("a", 2, 0, 4)
    assert draw_epoch(sampler) == [1]


def test_what_passes_during_an_epoch_counts_from_the_next_one() -> None:
    sampler = NoPositiveResampling(make_base(2, shuffle=False), list("ab"), ResamplingRules())
    draw_epoch(sampler)
    draws = iter(sampler)
    assert next(draws) == 0
    sampler.history.record("b", 1, 4, 4)
    assert list(draws) == [1]
    assert draw_epoch(sampler) == [0]


def test_filtering_starts_with_the_first_epoch_asked_for() -> None:
    sampler = NoPositiveResampling(make_base(2, shuffle=False), list("ab"), ResamplingRules(first_epoch=4))
    sampler.history.record("a", 1, 4, 4)
    assert [draw_epoch(sampler) for _ in range(4)] == [[0, 1], [0, 1], [0, 1], [1]]


def test_rows_of_equal_content_share_their_history_and_leave_together() -> None:
    """a stands twice; its responses passed in one row and failed in the other: 4 of 8 is not mastered."""
    sampler = NoPositiveResampling(make_base(3, shuffle=False), list("aba"), ResamplingRules())
    draw_epoch(sampler)
    sampler.history.record("a", 1, 4, 4)
    sampler.history.record("a", 1, 0, 4)
    assert draw_epoch(sampler) == [0, 1, 2]
    sampler.history.record("a", 2, 8, 8)
    assert draw_epoch(sampler) == [1]
    assert sampler.num_remaining == 1 and sampler.num_dropped == 1


def test_readmitted_prompt_sits_out_and_is_judged_anew() -> None:
    recorder = Recorder()
    rules = ResamplingRules(readmit_after_epochs=2)
    sampler = NoPositiveResampling(make_base(2, shuffle=False), list("ab"), rules, recorder)
    draw_epoch(sampler)
    sampler.history.record("a", 1, 4, 4)
    assert [draw_epoch(sampler) for _ in range(3)] == [[1], [1], [0, 1]]
    assert [change.readmitted for change in recorder.changes] == [(), (), (), ("a",)]
    # No new visit was recorded: it stays.
    assert draw_epoch(sampler) == [0, 1]
    sampler.history.record("a", 9, 4, 4)
    assert draw_epoch(sampler) == [1]


def test_order_of_the_wrapped_sampler_is_kept() -> None:
    plain = make_base(20)
    expected = [list(plain) for _ in range(3)]
    sampler = NoPositiveResampling(make_base(20), [str(row) for row in range(20)], ResamplingRules())
    assert draw_epoch(sampler) == expected[0]
    for row in (3, 7, 11):
        sampler.history.record(str(row), 1, 4, 4)
    for order in expected[1:]:
        assert draw_epoch(sampler) == [row for row in order if row not in (3, 7, 11)]


def test_iterator_that_is_never_used_counts_no_epoch() -> None:
    sampler = NoPositiveResampling(make_base(4), list("abcd"), ResamplingRules())
    iter(sampler), iter(sampler)
    assert sampler.epoch == 0
    next(iter(sampler))
    assert sampler.epoch == 1


def test_data_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="the training data has no rows"):
        NoPositiveResampling(make_base(1), [], ResamplingRules())


@dataclass
class Plan:
    """A training run to play: results of a batch are recorded ``lag`` batches after it was fetched."""

    num_rows: int = 12
    distinct: int = 12
    batch_size: int = 3
    lag: int = 0
    shuffle: bool = True
    workers: int = 0
    easy: float = 0.4
    seed: int = 0
    rules: ResamplingRules = field(default_factory=lambda: ResamplingRules(min_prompts=3))

    def ids(self) -> list[str]:
        return [f"p{row % self.distinct}" for row in range(self.num_rows)]

    def passed(self, prompt_id: str, step: int) -> int:
        """Of 4 responses; the same for the same prompt and step, whatever happened before."""
        return 4 if random.Random(f"{self.seed} {prompt_id} {step}").random() < self.easy else 2


class Run:
    """A trainer's use of the loader: fetch, train later, save, resume. Mirrors verl's _fetch_one_gen_batch."""

    def __init__(self, plan: Plan, checkpoint: bytes | None = None) -> None:
        self.plan, self.recorder = plan, Recorder()
        base = make_base(plan.num_rows, plan.shuffle, plan.seed)
        self.sampler = NoPositiveResampling(base, plan.ids(), plan.rules, self.recorder)
        self.loader = StatefulDataLoader(
            list(range(plan.num_rows)),
            batch_size=plan.batch_size,
            num_workers=plan.workers,
            drop_last=True,
            collate_fn=list,
            sampler=self.sampler,
        )
        self.iterator: Any = None
        self.step = 0
        self.in_flight: deque[tuple[int, list[int]]] = deque()
        if checkpoint is not None:
            state = torch.load(io.BytesIO(checkpoint), weights_only=False)
            self.loader.load_state_dict(state["loader"])
            self.step, self.in_flight = state["step"], deque(state["in_flight"])

    def _fetch(self) -> list[int]:
        try:
            if self.iterator is None:
                self.iterator = iter(self.loader)
            return next(self.iterator)
        except StopIteration:
            self.iterator = iter(self.loader)
            return next(self.iterator)

    def advance(self) -> list[int]:
        self.step += 1
        rows = self._fetch()
        self.in_flight.append((self.step, rows))
        while len(self.in_flight) > self.plan.lag:
            step, trained = self.in_flight.popleft()
            for row in trained:
                prompt_id = self.plan.ids()[row]
                self.sampler.history.record(prompt_id, step, self.plan.passed(prompt_id, step), 4)
        return rows

    def save(self) -> bytes:
        stream = io.BytesIO()
        state = {"loader": self.loader.state_dict(), "step": self.step, "in_flight": list(self.in_flight)}
        torch.save(state, stream)
        return stream.getvalue()


def play(plan: Plan, num_steps: int, interruptions: set[int]) -> tuple[list[list[int]], Run]:
    """All batches of a run that dies and resumes after each step in ``interruptions``, some steps after saving."""
    run, batches = Run(plan), []
    for step in range(1, num_steps + 1):
        batches.append(run.advance())
        if step in interruptions:
            checkpoint = run.save()
            # What the dying run did after its checkpoint must leave no trace.
            run.advance(), run.advance()
            run = Run(plan, checkpoint)
    return batches, run


plans = st.builds(
    Plan,
    num_rows=st.integers(6, 14),
    distinct=st.integers(4, 14),
    batch_size=st.integers(1, 3),
    lag=st.integers(0, 4),
    shuffle=st.booleans(),
    easy=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    seed=st.integers(0, 5),
    rules=st.builds(
        ResamplingRules,
        history=st.sampled_from(["latest", "cumulative"]),
        first_epoch=st.integers(2, 3),
        min_prompts=st.integers(3, 5),
        readmit_after_epochs=st.none() | st.integers(1, 2),
    ),
)


EPOCH_ENDS_IN_A_PASS = Plan(
    num_rows=6, distinct=4, easy=0.3, rules=ResamplingRules(min_prompts=3, min_responses=1, readmit_after_epochs=1)
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(plans, st.sets(st.integers(1, 24), max_size=4))
@example(EPOCH_ENDS_IN_A_PASS, set()).via("a pass of which an epoch's end leaves less than a batch")
@example(EPOCH_ENDS_IN_A_PASS, {5, 9, 14})
def test_interrupted_run_draws_what_an_uninterrupted_one_draws(plan: Plan, interruptions: set[int]) -> None:
    whole, one = play(plan, 24, set())
    parts, other = play(plan, 24, interruptions)
    assert parts == whole
    # And goes on alike; torchdata loads a state only when the next batch is fetched.
    assert [one.advance() for _ in range(6)] == [other.advance() for _ in range(6)]
    assert other.sampler.epoch == one.sampler.epoch
    assert {key: one.sampler.history.get(key) for key in plan.ids()} == {
        key: other.sampler.history.get(key) for key in plan.ids()
    }


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(plans.map(lambda plan: replace(plan, distinct=plan.num_rows)))
def test_every_epoch_draws_each_remaining_row_once_and_no_dropped_one(plan: Plan) -> None:
    """But for the rows that do not fill a last batch, which verl's loader drops."""
    batches, run = play(plan, 24, set())
    rows, ids = [row for batch in batches for row in batch], plan.ids()
    dropped: dict[str, int] = {}
    for change in run.recorder.changes:
        for prompt_id in change.readmitted:
            del dropped[prompt_id]
        dropped.update((prompt.prompt_id, change.epoch) for prompt in change.dropped)
        left = [row for row in range(plan.num_rows) if ids[row] not in dropped]
        assert change.num_remaining == len({ids[row] for row in left})
        assert change.num_remaining >= min(plan.rules.min_prompts, len(set(ids)))
        size = len(left) // plan.batch_size * plan.batch_size
        drawn, rows = rows[:size], rows[size:]
        assert max(Counter(drawn).values()) == 1 and set(drawn) <= set(left)
        assert len(drawn) == size or not rows
    assert not rows


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_round_trip_through_the_loader_with_and_without_workers(workers: int, shuffle: bool) -> None:
    """Worker processes are fed ahead: the saved position is that of the batch delivered, the history that of now."""
    plan = Plan(workers=workers, shuffle=shuffle, batch_size=2, rules=ResamplingRules(min_prompts=2), seed=3)
    whole, one = play(plan, 14, set())
    parts, other = play(plan, 14, {1, 6, 7, 12})
    assert parts == whole
    assert one.sampler.num_dropped == other.sampler.num_dropped > 0
    assert len(other.recorder.resumed_at) == 1


def test_history_recorded_after_a_batch_was_prefetched_is_saved() -> None:
    run = Run(Plan(workers=2, batch_size=2))
    run.advance()
    run.sampler.history.record("late", 1, 4, 4)
    run.loader._iterator._shutdown_workers()
    state = torch.load(io.BytesIO(run.save()), weights_only=False)
    sampler_state = state["loader"]["_snapshot"]["_main_snapshot"]["_sampler_iter_state"]["sampler_state"]
    assert "late" in sampler_state["history"]["ids"]
    assert type(sampler_state["history"]) is dict, "a checkpoint must not need our classes to be read"


def test_state_dict_that_is_copied_does_not_change_any_more() -> None:
    sampler = NoPositiveResampling(make_base(2), list("ab"), ResamplingRules())
    sampler.history.record("a", 1, 4, 4)
    state = copy.deepcopy(sampler.state_dict())
    sampler.history.forget("a")
    other = NoPositiveResampling(make_base(2), list("ab"), ResamplingRules())
    other.load_state_dict(state)
    assert other.history.get("a") is not None
    other.load_state_dict(sampler.state_dict())
    assert other.history.get("a") is None


def test_history_follows_prompts_to_reordered_data(caplog: pytest.LogCaptureFixture) -> None:
    sampler = NoPositiveResampling(make_base(3, shuffle=False), list("abc"), ResamplingRules())
    draw_epoch(sampler)
    sampler.history.record("a", 1, 4, 4)
    draw_epoch(sampler)
    other = NoPositiveResampling(make_base(4, shuffle=False), list("dcba"), ResamplingRules())
    other.load_state_dict(copy.deepcopy(sampler.state_dict()))
    assert "training data differs" in caplog.text
    assert draw_epoch(other) == [0, 1, 2]


def test_state_of_another_version_is_refused() -> None:
    sampler = NoPositiveResampling(make_base(2), list("ab"), ResamplingRules())
    with pytest.raises(ValueError, match=r"version 7, but this reads 1.*resume_mode=disable"):
        sampler.load_state_dict({"version": 7})


def test_checkpoint_of_a_run_without_the_sampler_is_refused() -> None:
    plan = Plan()
    plain = StatefulDataLoader(list(range(12)), batch_size=3, sampler=make_base(12), drop_last=True)
    next(iter(plain))
    run = Run(plan)
    run.loader.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match=r"written without no-positive-resampling.*~data\.sampler"):
        run.advance()


@pytest.mark.parametrize("shuffle", [True, False])
def test_checkpoint_of_another_order_is_refused(shuffle: bool) -> None:
    run = Run(Plan(shuffle=shuffle))
    run.advance()
    other = Run(Plan(shuffle=not shuffle), run.save())
    with pytest.raises(ValueError, match=r"set data\.shuffle to what it was"):
        other.advance()
