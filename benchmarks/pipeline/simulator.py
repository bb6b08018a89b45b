# SPDX-License-Identifier: Apache-2.0
"""A discrete-event simulator of generators and a trainer under the admission rule, with measured rates.

Generators are replicas that decode up to ``slots`` sequences at once; one decoding step gives each of them a token and
takes ``step_s + step_s_per_sequence * active`` seconds. The trainer needs ``train_s_per_token`` for a batch and
``update_s`` for handing over its weights. Four ways of working differ in what a weight update does to the generators:

- ``keep``: a pause of ``pause_s``, nothing else;
- ``recompute``: the same, then every active sequence is prefilled again at ``prefill_tokens_per_s``;
- ``abort``: a pause of ``pause_s``; everything a generator has leaves it and comes back ``resume_s`` later (the
  client's sleep), behind what was sent meanwhile, and is prefilled as above;
- ``sync``: the generators stand still from a complete batch until the next version is there (k = 0).
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from scalerl_verl.pipeline.admission import AdmissionRule
from scalerl_verl.pipeline.lead import Lead, Wait
from scalerl_verl.pipeline.versions import VersionRuns, count_by_age

WAYS = ("keep", "recompute", "abort", "sync")


@dataclass(frozen=True)
class Rates:
    """What one machine does, in seconds; see the module's text for the meaning of each."""

    num_replicas: int = 1
    slots: int = 64
    step_s: float = 0.01
    step_s_per_sequence: float = 0.0
    train_s_per_token: float = 1e-5
    update_s: float = 0.0
    pause_s: float = 0.0
    resume_s: float = 0.0
    prefill_tokens_per_s: float = float("inf")

    def __post_init__(self) -> None:
        if self.num_replicas < 1 or self.slots < 1 or self.step_s <= 0 or self.prefill_tokens_per_s <= 0:
            raise ValueError(f"{self}: replicas, slots, step_s and prefill_tokens_per_s must be positive")


@dataclass
class Sequence:
    """One response: its length in tokens, the group it belongs to, and the tokens it has by version."""

    group: int
    length: int
    prompt_tokens: int
    runs: VersionRuns = field(default_factory=list)
    start_count: float = 0.0
    done: int = 0


@dataclass
class Outcome:
    """What a simulated run did.

    Args:
        seconds: simulated time until the last step.
        trained_tokens: tokens of all trained batches.
        ages: age in versions -> trained tokens.
        generator_idle: fraction of slot-seconds without a sequence, pauses included.
        trainer_idle: fraction of the time in which the trainer waits for data.
        prefilled_again: tokens whose KV was computed a second time.
        wasted_tokens: tokens that were generated and never trained.
        trained_groups: groups in the order they were trained.
    """

    seconds: float
    trained_tokens: int
    ages: Counter[int]
    generator_idle: float
    trainer_idle: float
    prefilled_again: int
    wasted_tokens: int
    trained_groups: list[int]

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per simulated second."""
        return self.trained_tokens / self.seconds


class _Replica:
    """One engine: virtual token count per active sequence, so that a whole stretch of decoding is one event."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.queue: list[Sequence] = []
        self.active: list[tuple[float, int, Sequence]] = []
        self.num_away = 0
        self.count = 0.0
        self.now = 0.0
        self.blocked_until = 0.0
        self.busy_slot_s = 0.0
        self._tie = 0

    @property
    def load(self) -> int:
        """Sequences it has, waiting ones and those that will come back included."""
        return len(self.active) + len(self.queue) + self.num_away

    def step_time(self) -> float:
        return self.rates.step_s + self.rates.step_s_per_sequence * len(self.active)

    def advance(self, now: float) -> None:
        """Decode until ``now``."""
        start = max(self.now, min(self.blocked_until, now))
        if self.active and now > start:
            self.count += (now - start) / self.step_time()
            self.busy_slot_s += (now - start) * len(self.active)
        self.now = now

    def next_finish(self) -> float | None:
        if not self.active:
            return None
        left = max(0.0, self.active[0][0] - self.count)
        return max(self.now, self.blocked_until) + left * self.step_time()

    def fill(self) -> None:
        while self.queue and len(self.active) < self.rates.slots:
            sequence = self.queue.pop(0)
            sequence.start_count = self.count - sequence.done
            self._tie += 1
            heapq.heappush(self.active, (sequence.start_count + sequence.length, self._tie, sequence))

    def pop_finished(self) -> Sequence:
        target, _, sequence = heapq.heappop(self.active)
        self.count = max(self.count, target)
        return sequence

    def sampled(self, sequence: Sequence) -> int:
        return min(sequence.length, int(self.count - sequence.start_count + 1e-9))


class Simulation:
    """One run of ``num_steps`` optimizer steps.

    Args:
        rule: the admission rule (k = 0 for ``way="sync"``).
        rates: speeds of the machines.
        way: one of `WAYS`.
        group_size: responses a prompt.
        draw_length: a random generator -> tokens of a response (1 or more).
        prompt_tokens: tokens of a prompt, for the cost of prefilling again.
        seed: of the lengths.
        fail_probability: chance that a finished group has failed and is started again from nothing.
        lead: what keeps admission below the rule; None: the rule alone.
        reject_probability: chance that dynamic sampling rejects a finished group, which does not come back.
    """

    def __init__(
        self,
        rule: AdmissionRule,
        rates: Rates,
        way: str,
        group_size: int,
        draw_length: Callable[[random.Random], int],
        prompt_tokens: int = 0,
        seed: int = 0,
        fail_probability: float = 0.0,
        lead: Lead | None = None,
        reject_probability: float = 0.0,
    ) -> None:
        if way not in WAYS:
            raise ValueError(f"way={way!r}: use one of {', '.join(WAYS)}")
        if way == "sync" and rule.max_staleness:
            raise ValueError(f"way='sync' is on-policy: max_staleness={rule.max_staleness} must be 0")
        if not 0.0 <= fail_probability < 1.0:
            raise ValueError(f"fail_probability={fail_probability} must be in [0, 1): a group must be able to finish")
        if not 0.0 <= reject_probability < 1.0:
            raise ValueError(
                f"reject_probability={reject_probability} must be in [0, 1): a group must be able to train"
            )
        self.reject_probability = reject_probability
        self.rule, self.rates, self.way, self.group_size = rule, rates, way, group_size
        self.draw_length, self.prompt_tokens, self.fail_probability = draw_length, prompt_tokens, fail_probability
        self.lead = lead
        self.random = random.Random(seed)
        self.replicas = [_Replica(rates) for _ in range(rates.num_replicas)]
        self.version = 0
        self.start: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self.finished: dict[int, list[Sequence]] = {}
        self.partial: dict[int, list[Sequence]] = {}
        self.prefilled_again = self.wasted_tokens = self._next = 0
        # Both heaps may hold entries that are out of date; what is taken off is compared with the replica.
        self._finishes: list[tuple[float, int, int]] = []
        self._returns: list[tuple[float, int, int, list[Sequence]]] = []
        self._loads = [(0, index) for index in range(rates.num_replicas)]
        self._changes = [0] * rates.num_replicas
        self._now = 0.0  # replicas are advanced to it when something happens to them

    def run(self, num_steps: int) -> Outcome:
        """Simulate; returns when the trainer has finished its last step.

        Raises:
            RuntimeError: nothing can happen any more (a deadlock), or the rule was broken.
        """
        now = trainer_idle = 0.0
        ages: Counter[int] = Counter()
        trained: list[int] = []
        for step in range(num_steps):
            self._admit(num_steps - step)
            asked, wait = now, Wait(self.rule.batch_groups, lambda: self._now)
            wait.look(len(self.finished))
            while (batch := self._select()) is None:
                self._admit(num_steps - step)
                now = self._next_event(now)
                wait.look(len(self.finished))
            trainer_idle += now - asked
            short_s, waited_s = wait.short_s, wait.waited_s
            oldest = min(self.start[group] for group in batch)
            sequences = [sequence for group in batch for sequence in self.finished.pop(group)]
            for group in batch:
                del self.start[group]
            for sequence in sequences:
                ages.update(count_by_age(sequence.runs, self.version))
            trained += batch
            now = self._run_until(now, now + self.rates.train_s_per_token * sum(s.length for s in sequences))
            now = self._run_until(now, now + self.rates.update_s)
            if self.lead is not None and now > asked:
                step_s = now - asked
                self.lead.note_batch(self.version, oldest, wait.num_over, short_s / step_s, waited_s / step_s)
            self._update_weights(now)
        self.wasted_tokens += sum(s.length for group in self.finished.values() for s in group)
        busy = sum(replica.busy_slot_s for replica in self.replicas)
        slot_s = now * self.rates.slots * len(self.replicas)
        return Outcome(
            now, sum(ages.values()), ages, 1 - busy / slot_s, trainer_idle / now, self.prefilled_again,
            self.wasted_tokens, trained,
        )  # fmt: skip

    def _select(self) -> list[int] | None:
        if len(self.finished) < self.rule.batch_groups:
            return None
        done = {group: self.start[group] for group in self.finished}
        running = [start for group, start in self.start.items() if group not in self.finished]
        return self.rule.select(self.version, done, running)

    def _admit(self, num_steps_left: int) -> None:
        most = None if self.lead is None else self.lead.groups
        for _ in range(self.rule.num_to_admit(len(self.start), num_steps_left, most)):
            self._begin(self._next)
            self._next += 1

    def _begin(self, group: int) -> None:
        self.start[group], self.waiting[group] = self.version, self.group_size
        for _ in range(self.group_size):
            index = self._least_loaded()
            replica = self.replicas[index]
            replica.advance(self._now)
            replica.queue.append(Sequence(group, max(1, self.draw_length(self.random)), self.prompt_tokens))
            heapq.heappush(self._loads, (replica.load, index))
            replica.fill()
            self._schedule(index)

    def _least_loaded(self) -> int:
        """Take the replica with the fewest sequences off its heap, the first of equals."""
        while True:
            load, index = heapq.heappop(self._loads)
            if load == self.replicas[index].load:
                return index

    def _schedule(self, index: int) -> None:
        """Note when a replica that has changed will finish its next sequence."""
        self._changes[index] += 1
        time = self.replicas[index].next_finish()
        if time is not None:
            heapq.heappush(self._finishes, (time, index, self._changes[index]))

    def _next_finish(self) -> tuple[float, int] | None:
        """(time, replica) of the next finished sequence, or None."""
        while self._finishes:
            time, index, change = self._finishes[0]
            if change == self._changes[index]:
                return time, index
            heapq.heappop(self._finishes)
        return None

    def _next_time(self) -> float | None:
        """When something happens next, or None."""
        finish = self._next_finish()
        times = [event[0] for event in (finish, self._returns[0] if self._returns else None) if event is not None]
        return min(times) if times else None

    def _next_event(self, now: float) -> float:
        """Go to the next finished sequence, or to sequences that come back, and take them; returns the time."""
        time = self._next_time()
        if time is None:
            raise RuntimeError(f"deadlock at version {self.version}: {len(self.start)} groups, none of them running")
        self._now = now = max(now, time)
        if self._returns and self._returns[0][0] <= time:
            _, index, _, sequences = heapq.heappop(self._returns)
            self._take_back(index, sequences)
        else:
            finish = self._next_finish()
            assert finish is not None
            index = finish[1]
            self.replicas[index].advance(now)
            self._finish(index)
        self._schedule(index)
        return now

    def _take_back(self, index: int, sequences: list[Sequence]) -> None:
        replica = self.replicas[index]
        replica.advance(self._now)
        again = sum(s.prompt_tokens + s.done for s in sequences if s.done)
        self.prefilled_again += again
        replica.num_away -= len(sequences)
        replica.queue += sequences
        replica.blocked_until = max(replica.blocked_until, self._now + again / self.rates.prefill_tokens_per_s)
        replica.fill()

    def _run_until(self, now: float, end: float) -> float:
        """Generate while the trainer is busy."""
        if self.way == "sync":
            self._block(now, end)
            self._now = end
            return end
        while (time := self._next_time()) is not None and time <= end:
            now = self._next_event(now)
        self._now = end
        for replica in self.replicas:
            replica.advance(end)
        return end

    def _block(self, now: float, end: float) -> None:
        """No replica decodes until ``end``."""
        for index, replica in enumerate(self.replicas):
            replica.advance(now)
            replica.blocked_until = max(replica.blocked_until, end)
            self._schedule(index)

    def _finish(self, index: int) -> None:
        replica = self.replicas[index]
        sequence = replica.pop_finished()
        heapq.heappush(self._loads, (replica.load, index))
        self._note(sequence, sequence.length)
        self.waiting[sequence.group] -= 1
        self.partial.setdefault(sequence.group, []).append(sequence)
        if not self.waiting[sequence.group]:
            sequences = self.partial.pop(sequence.group)
            if self.random.random() < self.fail_probability:
                self.wasted_tokens += sum(s.length for s in sequences)
                self._begin(sequence.group)
            elif self.reject_probability and self.random.random() < self.reject_probability:
                self.wasted_tokens += sum(s.length for s in sequences)
                del self.start[sequence.group]
            else:
                self.finished[sequence.group] = sequences
        replica.fill()

    def _note(self, sequence: Sequence, num_tokens: int) -> None:
        if num_tokens > sequence.done:
            sequence.runs.append((self.version, num_tokens - sequence.done))
            sequence.done = num_tokens

    def _update_weights(self, now: float) -> None:
        for index, replica in enumerate(self.replicas):
            replica.advance(now)
            kept = 0
            for _, _, sequence in replica.active:
                self._note(sequence, replica.sampled(sequence))
                kept += sequence.prompt_tokens + sequence.done
            lost = self.rates.pause_s
            if self.way == "recompute":
                self.prefilled_again += kept
                lost += kept / self.rates.prefill_tokens_per_s
            if self.way == "abort":
                self._send_away(index, now + lost + self.rates.resume_s)
            replica.blocked_until = max(replica.blocked_until, now + lost)
            self._schedule(index)
        self.version += 1

    def _send_away(self, index: int, until: float) -> None:
        replica = self.replicas[index]
        sequences = [entry[2] for entry in sorted(replica.active)] + replica.queue
        replica.active, replica.queue, replica.num_away = [], [], replica.num_away + len(sequences)
        if sequences:
            heapq.heappush(self._returns, (until, index, self.version, sequences))
