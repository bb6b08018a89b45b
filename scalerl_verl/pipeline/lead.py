# SPDX-License-Identifier: Apache-2.0
"""How many groups are started ahead of training: as few as keep the trainer busy (standard library only).

The bound allows B * (k + 1) untrained groups. If the trainer is the bottleneck, most of them would only wait, finished,
in the queue and grow old, without one more trained token per second. So the lead begins at the bound and comes down by
the groups that were left over in each of the last batches. When the trainer has to wait for data, it goes up again. It
never exceeds the bound, so what `scalerl_verl.pipeline.admission` proves about age and progress still holds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from scalerl_verl.pipeline.admission import AdmissionRule

WINDOW = 6
"""Batches in a row that must leave groups over before the lead comes down."""
MARGIN = 0.25
"""Of a batch: groups left over that are no reason to come down."""
WAIT = 0.02
"""Share of a step that the trainer may wait without it counting."""
MEMORY = 32
"""Batches for which the lead stays above where the trainer had to wait."""


class Lead:
    """Groups that may be untrained at once, changed after each batch.

    A change has an effect only when groups that were started under it reach the trainer; until then the lead can only
    go up. The minimum is two batches: one trains while the other is generated.

    Args:
        rule: the bound.
    """

    def __init__(self, rule: AdmissionRule) -> None:
        self._batch = rule.batch_groups
        self._most = rule.num_to_admit(0)
        self._least = min(self._most, 2 * self._batch)
        self._margin = max(1, round(MARGIN * self._batch))
        self._over: deque[int] = deque(maxlen=WINDOW)
        self._changed_at: int | None = None
        self._floor, self._floor_until = 0, -1
        self.groups = self._most

    @property
    def batches(self) -> float:
        """Batches that may be under way or wait beside the one that trains."""
        return self.groups / self._batch - 1

    def note_batch(self, version: int, oldest: int, num_over: int, short: float, waited: float) -> None:
        """Take note of a batch that is about to be trained.

        Args:
            version: of the policy that it trains.
            oldest: start version of its oldest group.
            num_over: groups that were finished beyond a batch when the trainer first looked; below 0: too few.
            short: share of the step that the trainer waited for lack of finished groups.
            waited: share of the step that it waited at all, for a straggler that would become too old, too.
        """
        if self._changed_at is None:
            self._changed_at = version + 1  # what is started at once at the beginning says nothing
        if num_over < 0 and short > WAIT:
            self._come_up(version, short)
        elif oldest >= self._changed_at:
            self._over.append(num_over if waited <= WAIT else 0)
            if len(self._over) == WINDOW:
                self._come_down(version, min(self._over) - self._margin)

    def _come_up(self, version: int, short: float) -> None:
        if self.groups < self._most:
            self._floor, self._floor_until = min(self._most, self.groups + self._margin), version + MEMORY
            self.groups = min(self._most, max(self._floor, round(self.groups * (1 + short))))
        self._changed_at = version
        self._over.clear()

    def _come_down(self, version: int, num_needless: int) -> None:
        floor = self._floor if version < self._floor_until else 0
        groups = max(self._least, floor, self.groups - max(0, num_needless))
        if groups < self.groups:
            self.groups, self._changed_at = groups, version
            self._over.clear()


class Wait:
    """How long the trainer waits for one batch, and how much of that because too few groups are finished.

    Args:
        batch_groups: groups of a batch.
        clock: seconds, rising.
    """

    def __init__(self, batch_groups: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._batch_groups, self._clock = batch_groups, clock
        self._first: tuple[int, float] | None = None
        self._enough_at: float | None = None

    def look(self, num_finished: int) -> None:
        """Note how many groups are finished now; the first look is the moment from which the trainer waits."""
        now = self._clock()
        self._first = self._first or (num_finished, now)
        if self._enough_at is None and num_finished >= self._batch_groups:
            self._enough_at = now

    @property
    def num_over(self) -> int:
        """Groups beyond a batch at the first look."""
        return self._first_look[0] - self._batch_groups

    @property
    def short_s(self) -> float:
        """Seconds until a batch of groups was finished."""
        return (self._clock() if self._enough_at is None else self._enough_at) - self._first_look[1]

    @property
    def waited_s(self) -> float:
        """Seconds since the first look."""
        return self._clock() - self._first_look[1]

    @property
    def _first_look(self) -> tuple[int, float]:
        assert self._first is not None, "nobody has looked yet"
        return self._first
