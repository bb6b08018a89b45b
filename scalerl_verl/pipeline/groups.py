# SPDX-License-Identifier: Apache-2.0
"""How often each prompt group was tried, since when it is running, whether any ends well (standard library only)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from scalerl_verl.errors import GenerationFailedError
from scalerl_verl.names import PIPELINE_SECTION, REQUEST_TIMEOUT


class GroupWatch:
    """Attempts and ages of the groups that are under way.

    Args:
        max_attempts: tries of a group before it is given up.
        timeout_s: seconds after which a group that has not ended counts as stuck: its worker may be gone. The longest
            time that a group took until now comes on top: requests wait for each other where slots are few, and those
            that started together end one after the other.
        clock: seconds, rising.
    """

    COUNTS = ("groups_reissued", "groups_given_up")

    def __init__(self, max_attempts: int, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_attempts, self._timeout_s, self._clock = max_attempts, timeout_s, clock
        self._attempts: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._longest_s = 0.0

    def note_finished(self, groups: Iterable[str]) -> None:
        """Groups that have ended well."""
        now = self._clock()
        for group in groups:
            self._longest_s = max(self._longest_s, now - self._since.pop(group, now))

    def find_stuck(self, open_groups: Iterable[str]) -> set[str]:
        """Groups that have been open for too long; one is timed from the first call that names it."""
        now, limit_s = self._clock(), self._timeout_s + self._longest_s
        return {group for group in open_groups if now - self._since.setdefault(group, now) > limit_s}

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


class GiveUpStreak:
    """Stops a run of which nothing comes any more: groups are given up and none has finished in between.

    A few prompts that always fail among healthy ones never get there: each finished group starts the count anew.

    Args:
        limit: groups given up in a row that end the run; not less than `LEAST`, since a batch of one prompt says
            little about the next.
    """

    LEAST = 8

    def __init__(self, limit: int) -> None:
        self._limit = max(limit, self.LEAST)
        self._num = 0
        self._finished: frozenset[str] = frozenset()

    def note(self, finished: Collection[str], given_up: Collection[str], last_error: str) -> None:
        """Take note of a look at the groups.

        Args:
            finished: groups that are complete and wait to be trained.
            given_up: groups that were given up in this look.
            last_error: why, of the last of them.

        Raises:
            GenerationFailedError: ``limit`` groups in a row.
        """
        is_new = not self._finished.issuperset(finished)
        self._finished = frozenset(finished)
        self._num = 0 if is_new else self._num + len(given_up)
        if given_up and self._num >= self._limit:
            raise GenerationFailedError(
                f"{self._num} prompt groups in a row were given up and none finished in between. The last error: "
                f"{last_error}. The fault is unlikely to be in single prompts: look at the first traceback of an "
                "AgentLoopWorker in the log (tokenizer and chat template, agent loop, reward function), and whether "
                f"responses fit into {REQUEST_TIMEOUT}; each group was tried "
                f"{PIPELINE_SECTION}.max_attempts times"
            )
