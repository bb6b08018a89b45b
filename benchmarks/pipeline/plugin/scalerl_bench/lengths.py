# SPDX-License-Identifier: Apache-2.0
"""An agent loop whose responses have lengths of their own: the same distribution in every trainer mode.

A random model has no lengths of its own. Each response is as long as a draw from an exponential distribution, cut at
the prompt's limit; the end token does not end it. verl loads this class by ``rollout.agent.agent_loop_config_path``.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

_drawing = random.Random()  # of this process, seeded by the system: no two workers draw alike


def draw_length(mean: float, longest: int) -> int:
    """Tokens of one response: 1 to ``longest``, exponential before the cut."""
    return min(longest, 1 + int(_drawing.expovariate(1 / mean)))


async def wait_at_gate() -> None:
    """Say that this run is ready, and wait until the file BENCH_GATE is there (without the variable: not at all)."""
    gate = os.environ.get("BENCH_GATE")
    if not gate or os.path.exists(gate):
        return
    Path(f"{gate}.ready").touch()
    while not os.path.exists(gate):
        await asyncio.sleep(0.05)


class DrawnLengths(SingleTurnAgentLoop):
    """verl's single turn; ``extra_info`` of the prompt says ``mean`` and ``longest``."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        await wait_at_gate()
        wanted = kwargs["extra_info"]
        length = draw_length(float(wanted["mean"]), int(wanted["longest"]))
        params = {**sampling_params, "max_tokens": length, "ignore_eos": True}
        return await super().run(params, priority, **kwargs)
