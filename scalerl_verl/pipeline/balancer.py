# SPDX-License-Identifier: Apache-2.0
"""verl's load balancer that spares a generator out of reach for a while, and removes it after several times."""

from __future__ import annotations

import logging
import time
from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer

from scalerl_verl.errors import NoGeneratorError
from scalerl_verl.pipeline.failures import strike_pause_s

logger = logging.getLogger(__name__)


class PipelineBalancer(GlobalRequestLoadBalancer):
    """The one place that counts strikes: every agent loop worker reports here, and the weight updater asks here.

    A strike is a time in which requests could not reach a server. They all fail at once, so reports within the pause
    that follows a strike are the same one. A request that the server answers afterwards clears its strikes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._strikes: dict[str, int] = {}
        self._paused_until: dict[str, float] = {}

    def acquire_server(self, request_id: str) -> tuple[str, Any]:
        """verl's choice among the servers that are not paused; among all if they all are.

        Raises:
            NoGeneratorError: every server was removed.
        """
        if not self._inflight_requests:
            raise NoGeneratorError("no generator takes requests at the moment")
        paused = self._find_paused()
        if len(paused) == len(self._inflight_requests):
            return super().acquire_server(request_id)
        # Out of sight of verl's choice, of its sticky ids as well: what fails at once has the fewest requests.
        hidden = {server_id: self._inflight_requests.pop(server_id) for server_id in paused}
        try:
            return super().acquire_server(request_id)
        finally:
            self._inflight_requests.update(hidden)

    def report_unreachable(self, server_id: str, max_strikes: int) -> float:
        """A request could not reach a server.

        Args:
            server_id: its address.
            max_strikes: with so many strikes in a row it is removed.

        Returns:
            Seconds until a request has a chance: 0 if another server takes it.
        """
        if server_id in self._inflight_requests and server_id not in self._find_paused():
            strikes = self._strikes[server_id] = self._strikes.get(server_id, 0) + 1
            logger.warning("generator %s could not be reached: strike %d of %d", server_id, strikes, max_strikes)
            if strikes < max_strikes:
                self._paused_until[server_id] = time.monotonic() + strike_pause_s(strikes)
            else:
                self.remove_servers([server_id])
        paused = self._find_paused()
        if not paused or len(paused) < len(self._inflight_requests):
            return 0.0
        return max(0.0, min(self._paused_until[server] for server in paused) - time.monotonic())

    def report_reached(self, server_id: str) -> None:
        """A request that was sent to a server after a strike was answered."""
        self._strikes.pop(server_id, None)
        self._paused_until.pop(server_id, None)

    def remove_servers(self, server_ids: list[str]) -> None:
        """verl's; what is removed begins without strikes if it ever comes back."""
        super().remove_servers(server_ids)
        for server_id in server_ids:
            self.report_reached(server_id)

    def _find_paused(self) -> list[str]:
        now = time.monotonic()
        return [server for server, until in self._paused_until.items() if now < until]
