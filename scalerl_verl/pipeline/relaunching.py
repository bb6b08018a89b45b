# SPDX-License-Identifier: Apache-2.0
"""Generators in the place of dead ones, launched while the run goes on."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import ray
from verl.plugin.platform import get_platform

from scalerl_verl.names import MAX_RELAUNCHES
from scalerl_verl.pipeline.failures import describe, strike_pause_s

logger = logging.getLogger(__name__)
LOOK_S = 2.0
"""Seconds between looks at what ends, or becomes free, by itself."""
END_TIMEOUT_S = 120.0
"""Seconds a killed process has to be gone before the try counts as failed."""


class Relauncher:
    """Launches generators anew, each in a thread of its own.

    Args:
        launch: ``launch(replica)`` ends what is left of a replica and returns one that is up in its place, with the
            weights that its engine invents.
        max_relaunches: tries for one generator in a run, whether they succeed or not.
    """

    def __init__(self, launch: Callable[[Any], Any], max_relaunches: int) -> None:
        self._launch, self._max_relaunches = launch, max_relaunches
        self._num_tries: Counter[int] = Counter()
        self._threads: dict[int, threading.Thread] = {}
        self._launched: dict[int, Any] = {}

    @property
    def num_under_way(self) -> int:
        """Generators that are being launched, or are up and not yet taken."""
        return len(self._threads)

    def start(self, replica: Any) -> None:
        """Launch one in the place of ``replica``, which is dead and takes no part any more; returns at once."""
        rank = replica.replica_rank
        if rank in self._threads:
            return
        if self._num_tries[rank] >= self._max_relaunches:
            logger.warning("generator %s is not launched again: %s=%d", rank, MAX_RELAUNCHES, self._max_relaunches)
            return
        thread = self._threads[rank] = threading.Thread(target=self._run, args=(replica,), daemon=True)
        thread.start()

    def take_launched(self) -> list[Any]:
        """Those that are up by now; they have no weights of the run yet."""
        ended = [rank for rank, thread in list(self._threads.items()) if not thread.is_alive()]
        for rank in ended:
            del self._threads[rank]
        return [self._launched.pop(rank) for rank in ended if rank in self._launched]

    def _run(self, replica: Any) -> None:
        rank = replica.replica_rank
        while self._num_tries[rank] < self._max_relaunches:
            self._num_tries[rank] += 1
            num = self._num_tries[rank]
            logger.warning("generator %s is launched again: try %d of %d", rank, num, self._max_relaunches)
            try:
                self._launched[rank] = self._launch(replica)
                logger.warning("generator %s is up again", rank)
                return
            except Exception as error:  # noqa: BLE001 - whatever a start can end with; it is tried again
                logger.warning("launching generator %s failed: %s", rank, describe(error))
            if num < self._max_relaunches:
                time.sleep(strike_pause_s(num))
        logger.warning("generator %s is given up: %s=%d tries failed", rank, MAX_RELAUNCHES, self._max_relaunches)


def launch_again(replica: Any, make: Callable[[], Any]) -> Any:
    """End what is left of ``replica`` and launch another one; waits for devices, its own or those of a node that joins.

    Args:
        replica: verl's; its processes may be dead, or hang.
        make: makes verl's object of the other one, without launching it.

    Raises:
        TimeoutError: a process did not end.
        Exception: what a launch ends with.
    """
    _end(replica)
    while ray.available_resources().get(get_platform().ray_resource_name(), 0) < replica.world_size:
        time.sleep(LOOK_S)
    fresh = make()
    try:
        asyncio.run(fresh.init_standalone())
    except BaseException:
        _end(fresh)  # its devices are for the next try
        raise
    return fresh


def _end(replica: Any) -> None:
    actors = [*replica.servers, *replica.workers]
    for actor in actors:
        ray.kill(actor)
    for group in getattr(replica.resource_pool, "pgs", None) or []:
        ray.util.remove_placement_group(group)
    deadline = time.monotonic() + END_TIMEOUT_S
    while living := _find_living(actors):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(living)} processes of the generator did not end in {END_TIMEOUT_S:g} s")


def _find_living(actors: Iterable[Any]) -> list[Any]:
    living = []
    for actor in actors:
        try:
            ray.get(actor.__ray_ready__.remote(), timeout=LOOK_S)
            living.append(actor)
        except ray.exceptions.GetTimeoutError:
            living.append(actor)
        except ray.exceptions.RayActorError as error:
            if isinstance(error, ray.exceptions.ActorUnavailableError):
                living.append(actor)
    return living
