# SPDX-License-Identifier: Apache-2.0
"""Tell an agent loop whether its response is for validation, and which tokens end a turn."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from scalerl_verl.upstream.spec import PatchSpec


def _build_context(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    async def _run_agent_loop(self: Any, sampling_params: Any, trajectory: Any, *args: Any, **kwargs: Any) -> Any:
        from scalerl_verl.plugins.agent_loop import response_context

        with response_context(self, trajectory):
            return await original(self, sampling_params, trajectory, *args, **kwargs)

    return _run_agent_loop


SPECS = (
    PatchSpec(
        name="verl.agent_loop.context",
        module="verl.experimental.agent_loop.agent_loop",
        target="AgentLoopWorker._run_agent_loop",
        build=_build_context,
        kind="wrap",
        why="An agent loop is not told whether it generates for validation, which has budgets of its own, nor which "
        "tokens of the model's generation config end a turn.",
        distribution="verl",
        versions=">=0.9.0,<0.10",
        sources=("c70a4be3f55e531715ad2412955746d79e4eab6bd67dbc5f1e5d0defc31a1df3",),
        when="named",
        removal="verl passes the trajectory's `validate` and the generation config to agent loops",
        late_ok=True,
    ),
)
