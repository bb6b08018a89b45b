# SPDX-License-Identifier: Apache-2.0
"""How long a request waits for a slot of an engine when all that admission sends is there at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scalerl_verl.names import MAX_STALENESS, PIPELINE_RL, REQUEST_TIMEOUT, ROLLOUT
from scalerl_verl.planning.layout import RunLayout


@dataclass(frozen=True)
class Queueing:
    """Requests of one engine of a pipeline run.

    Args:
        requests: that admission sends, over the engines.
        slots: sequences that the engine generates at once.
        response_s: seconds of a response of mean length.
        longest_s: seconds of the longest response allowed.
        request_timeout_s: seconds that a request has once it is in a slot.
    """

    requests: float
    slots: float
    response_s: float
    longest_s: float
    request_timeout_s: float

    @property
    def wait_s(self) -> float:
        """Seconds that the last request waits: those ahead of it / slots x time of a response."""
        return max(0.0, self.requests - self.slots) / self.slots * self.response_s

    def notes(self) -> Iterator[str]:
        """What stands in no one's way and yet is worth knowing."""
        limit = f"{REQUEST_TIMEOUT}={self.request_timeout_s:g}"
        if self.wait_s > self.request_timeout_s:
            yield (
                f"the last of {self.requests:,.0f} requests on an engine waits {self.wait_s:,.0f} s for one of its "
                f"{self.slots:,.0f} slots, longer than {limit}. No request is aborted for waiting, but validation "
                f"waits as long: use more generators, a smaller {MAX_STALENESS} or batch, or more slots "
                f"({ROLLOUT}.max_num_seqs, memory for the cache)"
            )
        if self.longest_s > self.request_timeout_s:
            yield (
                f"the longest response takes {self.longest_s:,.0f} s in its slot, longer than {limit}: it would be "
                "aborted and begun again for nothing; raise the limit"
            )


def find_queueing(layout: RunLayout, slots: float, step_s: float, mean_response: float) -> Queueing | None:
    """The queue of an engine; None outside of ``pipeline_rl``, where nothing is sent ahead.

    Args:
        layout: of the run.
        slots: sequences that cache and settings let an engine generate at once.
        step_s: seconds of a decoding step with all of them.
        mean_response: tokens of a response.
    """
    if layout.mode != PIPELINE_RL:
        return None
    engines = max(layout.generator_gpus // layout.gpus_per_engine, 1)
    return Queueing(
        requests=layout.sequences_per_update * (layout.max_staleness + 1) / engines,
        slots=slots,
        response_s=mean_response * step_s,
        longest_s=layout.max_response * step_s,
        request_timeout_s=layout.request_timeout_s,
    )
