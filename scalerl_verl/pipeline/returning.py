# SPDX-License-Identifier: Apache-2.0
"""Generators that were left out and whose processes may live: they are asked until they answer, or are dead."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import ray

from scalerl_verl.pipeline.failures import is_unreachable

logger = logging.getLogger(__name__)


class LeftOut:
    """Asks generators whether they can take part again, without waiting for an answer.

    A question reaches a process that is hung when it goes on, and one that is out of reach when it is asked again.

    Args:
        max_returns: times that one generator comes back: each costs a new process group, and maybe a time-out.
        limit_s: seconds after which one that has not answered will not come back.
        on_dead: called with each that will not come back: dead, hung for too long, or left out too often.
    """

    def __init__(self, max_returns: int, limit_s: float, on_dead: Callable[[Any], None]) -> None:
        self._max_returns, self._limit_s, self._on_dead = max_returns, limit_s, on_dead
        self._num_returns: Counter[int] = Counter()
        self._questions: dict[Any, list[Any]] = {}
        self._since: dict[Any, float] = {}

    @property
    def num_asked(self) -> int:
        """Generators that may yet come back."""
        return len(self._questions)

    def add(self, replicas: Iterable[Any]) -> None:
        """Generators that get neither requests nor weights from here on."""
        for replica in replicas:
            if self._num_returns[replica.replica_rank] < self._max_returns:
                self._questions[replica] = _ask(replica)
                self._since[replica] = time.monotonic()
            else:
                self._on_dead(replica)

    def find_returned(self) -> list[Any]:
        """Those that have let go of all their requests and answer again; they are not asked any more."""
        returned = []
        for replica, questions in list(self._questions.items()):
            _, pending = ray.wait(questions, num_returns=len(questions), timeout=0)
            is_late = time.monotonic() - self._since[replica] > self._limit_s
            if pending and not is_late:
                continue
            del self._questions[replica]
            if pending:
                logger.warning("generator %s has not answered for %g s", replica.replica_rank, self._limit_s)
                self._on_dead(replica)
                continue
            try:
                ray.get(questions)
            except ray.exceptions.RayError as error:
                if is_unreachable(error) and not is_late:
                    self._questions[replica] = _ask(replica)
                else:
                    logger.warning("generator %s does not come back: %s", replica.replica_rank, type(error).__name__)
                    self._on_dead(replica)
                continue
            self._num_returns[replica.replica_rank] += 1
            returned.append(replica)
        return returned


def _ask(replica: Any) -> list[Any]:
    return [replica.servers[0].rejoin.remote(), *(worker.get_replica_rank.remote() for worker in replica.workers)]
