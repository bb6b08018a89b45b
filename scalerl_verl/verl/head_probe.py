# SPDX-License-Identifier: Apache-2.0
"""Bring what the engine measured of its head to the driver, and compare trainer and generator there at start."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from scalerl_verl.upstream.spec import VERL_VERSIONS, PatchSpec

_VERSIONS = VERL_VERSIONS
_READ = "scalerl_head_facts"
_REMOVAL = "verl compares the log-probs of trainer and generator at start"


def _build_extension(original: Any, module: ModuleType) -> Any:
    def scalerl_head_facts(self: Any) -> list[dict[str, Any]]:
        from scalerl_verl.head.agreement import read_head_facts

        return read_head_facts(self)

    setattr(original, _READ, scalerl_head_facts)
    return original


def _build_server(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    async def run_server(self: Any, args: Any) -> None:
        from scalerl_verl.head.vllm_probe import HEAD_FACT
        from scalerl_verl.upstream import status

        await original(self, args)
        for noted in await self.engine.collective_rpc(_READ):
            for entry in noted:
                status.add_fact(HEAD_FACT, entry)

    return run_server


SPECS = (
    PatchSpec(
        name="verl.head_probe.engine",
        module="verl.workers.rollout.vllm_rollout.utils",
        target="vLLMColocateWorkerExtension",
        build=_build_extension,
        kind="register",
        why="What a vLLM worker measured of its head stays in that process; verl's worker extension is how a server "
        "asks for it.",
        distribution="verl",
        versions=_VERSIONS,
        sources=("ee243df2600d59a0b46f1a16a22030dcd7fdc49a0fe7da6474fc53b93ae33f1b",),
        when="named",
        removal=_REMOVAL,
        late_ok=True,
    ),
    PatchSpec(
        name="verl.head_probe.server",
        module="verl.workers.rollout.vllm_rollout.vllm_async_server",
        target="vLLMHttpServer.run_server",
        build=_build_server,
        kind="wrap",
        why="vLLM's engine processes are no Ray actors: their server has to fetch what they measured for the driver.",
        distribution="verl",
        versions=_VERSIONS,
        sources=("613b6ecbf0b57f5a23cdb3e098c4eb0c5de0b2b0c2efed91f141b7ace58973c7",),
        when="named",
        removal=_REMOVAL,
        late_ok=True,
    ),
)
