# SPDX-License-Identifier: Apache-2.0
"""Tell an agent loop what its response is for and which tokens end a turn, and the trainer what came to nothing."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from scalerl_verl.upstream.spec import VERL_VERSIONS, PatchSpec


def _build_context(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    async def _run_agent_loop(self: Any, sampling_params: Any, trajectory: Any, *args: Any, **kwargs: Any) -> Any:
        from scalerl_verl.interruption.verl import response_context

        with response_context(self, trajectory):
            try:
                return await original(self, sampling_params, trajectory, *args, **kwargs)
            except Exception as error:
                from scalerl_verl.pipeline.failures import note_failure

                await note_failure(self.config, trajectory, kwargs.get("uid"), error)
                raise

    return _run_agent_loop


def _build_score(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    async def _compute_score(self: Any, outputs: Any, kwargs: Any) -> None:
        await original(self, outputs, kwargs)

        from scalerl_verl.verl.finite_reward import require_finite_reward

        require_finite_reward(self.config, outputs[-1], is_scored=self.reward_loop_worker_handles is not None)

    return _compute_score


SPECS = (
    PatchSpec(
        name="verl.agent_loop.context",
        module="verl.experimental.agent_loop.agent_loop",
        target="AgentLoopWorker._run_agent_loop",
        build=_build_context,
        kind="wrap",
        why="An agent loop is not told whether it generates for validation, which has budgets of its own, nor which "
        "tokens of the model's generation config end a turn; what it raises goes to its worker's log only, so a "
        "trainer whose groups all fail could not say why.",
        distribution="verl",
        versions=VERL_VERSIONS,
        sources=("c70a4be3f55e531715ad2412955746d79e4eab6bd67dbc5f1e5d0defc31a1df3",),
        when="named",
        removal="verl passes the trajectory's `validate` and the generation config to agent loops, and tags failed "
        "prompts with their error",
        late_ok=True,
    ),
    PatchSpec(
        name="verl.agent_loop.score",
        module="verl.experimental.agent_loop.agent_loop",
        target="AgentLoopWorker._compute_score",
        build=_build_score,
        kind="wrap",
        why="A reward that is no finite number goes into the batch, where it ends the run; in a pipeline run the group "
        "can be tried again, or given up, as one whose reward function raises.",
        distribution="verl",
        versions=VERL_VERSIONS,
        sources=("6cfa321612555ae3104b245a0dbda7bac32843878a0069e16b605d6338e3c80e",),
        when="named",
        removal="verl fails a prompt whose reward is not finite",
        late_ok=True,
    ),
)
