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


def _build_init(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def init(self: Any) -> None:
        from scalerl_verl.head.verl_first_batch import probe_sides

        original(self)
        probe_sides(self)

    return init


def _build_log_prob(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def _compute_old_log_prob(self: Any, batch: Any, metrics: dict) -> Any:
        from scalerl_verl.head.verl_first_batch import probe_first_batch
        from scalerl_verl.loss.verl_config import statistics_mode

        with statistics_mode(self.config):
            batch = original(self, batch, metrics)
        probe_first_batch(self, batch, metrics)
        return batch

    return _compute_old_log_prob


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
    PatchSpec(
        name="verl.head_probe.init",
        module="verl.trainer.ppo.v1.trainer_base",
        target="PPOTrainer.init",
        build=_build_init,
        kind="wrap",
        why="An FP32 head on one side only makes a larger mismatch than none: both are compared as soon as both stand.",
        distribution="verl",
        versions=_VERSIONS,
        sources=("428ab07487058adabf14cd0d84f338c3a4fb8d248959c2185f6b845b3ac03cdb",),
        when="named",
        removal=_REMOVAL,
        late_ok=True,
    ),
    PatchSpec(
        name="verl.head_probe.first_batch",
        module="verl.trainer.ppo.v1.trainer_base",
        target="PPOTrainer._compute_old_log_prob",
        build=_build_log_prob,
        kind="wrap",
        why="With bypass_mode nobody computes the trainer's log-probs of a batch before the update moves the weights. "
        "Without it, the entropy metric is aggregated in the actor's mode, of which verl does not know prompt-mean.",
        distribution="verl",
        versions=_VERSIONS,
        sources=("9dc843b0b42230f347fc6c18fa027506ffde3ade183fbf4f058ae9c0b473719c",),
        when="named",
        removal=_REMOVAL,
        late_ok=True,
    ),
)
