# SPDX-License-Identifier: Apache-2.0
"""Generators as Ray actors: our server class and limits around an engine that does what a test says."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import ray

from scalerl_verl.cpu.vllm_alias import install_vllm_alias

install_vllm_alias()

from scalerl_verl.pipeline.server import PipelineHttpServer, PipelineReplica  # noqa: E402
from scalerl_verl.pipeline.vllm import METHOD, SWAP  # noqa: E402
from tests.pipeline_server import furnish  # noqa: E402


class StubEngine:
    """In place of vLLM's: takes every request in, answers one that is finished, or all with the door open, swaps.

    With an ``error`` set, it raises that instead of an answer.
    """

    dead_error = RuntimeError("the engine is dead")

    def __init__(self) -> None:
        self.door = asyncio.Event()
        self.running: dict[str, Any] = {}
        self.entered: list[Any] = []
        self.aborted: list[str] = []
        self.error: Exception | None = None
        self.output_processor = SimpleNamespace(request_states=self.running)
        self.engine_core = SimpleNamespace(call_utility_async=self._call_utility)

    async def add_request(self, request_id: str, prompt: Any, *_: Any) -> Any:
        self.entered.append(prompt)
        state = self.running[f"{request_id}-inner"] = SimpleNamespace(is_prefilling=True, ended=asyncio.Event())
        return SimpleNamespace(request_id=f"{request_id}-inner", ended=state.ended)

    def finish(self, inner_id: str) -> None:
        self.running[inner_id].ended.set()

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        queue = await self.add_request(request_id, prompt, sampling_params)
        waits = [asyncio.ensure_future(event.wait()) for event in (self.door, queue.ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        was_aborted = self.running.pop(queue.request_id, None) is None
        if self.error is not None:
            raise self.error
        tokens, reason = ([], "abort") if was_aborted else ([7], "stop")
        output = SimpleNamespace(token_ids=tokens, logprobs=None, finish_reason=reason)
        yield SimpleNamespace(outputs=[output], num_cached_tokens=0, prompt_logprobs=None)

    async def abort(self, inner_ids: str | list[str], internal: bool) -> None:
        for name in [inner_ids] if isinstance(inner_ids, str) else inner_ids:
            if name in self.running:
                self.running.pop(name).ended.set()
                self.aborted.append(name)

    async def check_health(self) -> None:
        pass

    async def _call_utility(self, method: str, *_: Any) -> dict[str, Any]:
        counts = {name: (0, 0) for name in self.running}
        if method == METHOD:
            return counts
        assert method == SWAP
        return {"counts": counts, "pause_s": 0.0, "swap_s": 0.0, "drain_s": 0.0}


class GeneratorActor(PipelineHttpServer):
    """Our server as it is, but for its constructor, which would start vLLM."""

    def __init__(self) -> None:
        furnish(self, StubEngine(), max_model_len=64, prompt_length=16, response_length=16)

    async def get_pid(self) -> int:
        return os.getpid()

    async def num_running(self) -> int:
        return len(self.engine.running)

    async def num_aborted(self) -> int:
        return len(self.engine.aborted)

    async def open_door(self) -> None:
        self.engine.door.set()


class Worker:
    """In place of the generator's worker that receives weights."""

    def get_replica_rank(self) -> int:
        return 0


class Replica(SimpleNamespace):
    """What the weight updater knows of a generator."""

    __hash__ = object.__hash__  # verl puts replicas into a set


def start_generators(num: int) -> list[Replica]:
    """Generators as two Ray actors each, which let in as many calls as a replica of ours."""
    limit = PipelineReplica.max_concurrency.fget(SimpleNamespace(config=SimpleNamespace(max_num_seqs=256)))  # type: ignore[attr-defined]
    server_class = ray.remote(GeneratorActor).options(num_cpus=0, max_concurrency=limit)
    worker_class = ray.remote(Worker).options(num_cpus=0)
    servers, workers = ([cls.remote() for _ in range(num)] for cls in (server_class, worker_class))
    ray.get([server.check_alive.remote() for server in servers] + [w.get_replica_rank.remote() for w in workers])
    return [
        Replica(replica_rank=rank, servers=[server], workers=[worker], server_address=f"generator-{rank}")
        for rank, (server, worker) in enumerate(zip(servers, workers, strict=True))
    ]
