# SPDX-License-Identifier: Apache-2.0
"""How often each prompt group was tried and since when it is running (standard library only)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable


class GroupWatch:
    """Attempts and ages of the groups that are under way.

    Args:
        max_attempts: tries of a group before it is given up.
        timeout_s: seconds after which a group that has not ended counts as stuck: its worker may be gone.
        clock: seconds, rising.
    """

    COUNTS = ("groups_reissued", "groups_given_up")

    def __init__(self, max_attempts: int, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_attempts, self._timeout_s, self._clock = max_attempts, timeout_s, clock
        self._attempts: dict[str, int] = {}
        self._since: dict[str, float] = {}

    def find_stuck(self, open_groups: Iterable[str]) -> set[str]:
        """Groups that have been open for too long; one is timed from the first call that names it."""
        now = self._clock()
        return {group for group in open_groups if now - self._since.setdefault(group, now) > self._timeout_s}

    def sort_failed(self, failed: Iterable[str]) -> tuple[list[str], list[str]]:
        """(groups to try again, groups to give up)."""
        again: list[str] = []
        given_up: list[str] = []
        for group in failed:
            (again if self._attempts.get(group, 1) < self._max_attempts else given_up).append(group)
        self.forget(given_up)
        return again, given_up

    def renew(self, old: str, new: str) -> None:
        """A group goes on under another name."""
        self._attempts[new] = self._attempts.pop(old, 1) + 1
        self._since.pop(old, None)

    def forget(self, groups: Iterable[str]) -> None:
        """Groups that are trained or given up."""
        for group in groups:
            self._attempts.pop(group, None)
            self._since.pop(group, None)
