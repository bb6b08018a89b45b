# SPDX-License-Identifier: Apache-2.0
"""The server of a generator in a run with our names, and the replica that launches it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.outputs import RequestOutput

from scalerl_verl.generator import frontend
from scalerl_verl.upstream import status

EXTENSION = "scalerl_verl.generator.worker.ScaleRLWorkerExtension"


class ScaleRLHttpServer(vLLMHttpServer):
    """verl's vLLM server, which also brings what its engine measured, such as its head, and knows `frontend`."""

    def _post_init(self, cuda_visible_devices: str) -> None:
        super()._post_init(cuda_visible_devices)
        self._is_fast = frontend.is_marked(self.config)
        self._unannounced: set[asyncio.Task | None] = set()

    def _get_worker_extension_cls(self) -> str:
        return EXTENSION

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        for noted in await self.engine.collective_rpc("scalerl_facts"):
            for name, entries in noted.items():
                for entry in entries:
                    status.add_fact(name, entry)
        if self._is_fast:
            status.add_fact(frontend.FACT, {"replica": self.replica_rank})
        # Attributes of this one engine, and nothing of vLLM is changed. Every request enters through the second.
        self.engine.pause_generation = take_old_pause(self.engine.pause_generation)
        self._add_request = self.engine.add_request
        self.engine.add_request = self._enter

    async def generate(self, prompt_ids: list[int], sampling_params: dict, request_id: str, **kwargs: Any) -> Any:
        """verl's ``generate``; what it returns is the same whether or not the front end is the fast one."""
        fast = frontend.final_only(sampling_params) if self._is_fast else None
        if fast is None:
            return await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        task = asyncio.current_task()  # its id does not tell a request: verl's full_determinism gives all the same
        self._unannounced.add(task)
        try:
            return await super().generate(prompt_ids, fast, request_id, **kwargs)
        finally:
            self._unannounced.discard(task)

    async def _enter(self, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's ``add_request``, for every request to the engine.

        verl counts a request as on its way into the engine until its first output, and an abort of all requests waits
        for those on their way. A request that has one output only gets an empty one as soon as the engine has it.
        """
        queue = await self._take_in(request_id, prompt, *args, **kwargs)
        task = asyncio.current_task()
        if task in self._unannounced:
            self._unannounced.discard(task)
            if queue.output is None:
                queue.put(RequestOutput(request_id, None, None, None, outputs=[], finished=False))
        return queue

    async def check_alive(self) -> None:
        """Raises what vLLM raises when its engine is dead."""
        await self.engine.check_health()

    async def _take_in(self, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        return await self._add_request(request_id, prompt, *args, **kwargs)


def take_old_pause(pause: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """vLLM's ``pause_generation``, with an argument that verl 0.9.1 passes and vLLM dropped in 0.32.

    ``wait_for_inflight_requests=True`` was ``mode="wait"``; False, which verl passes, left the mode as it was.
    """
    if "wait_for_inflight_requests" in inspect.signature(pause).parameters:
        return pause

    async def pause_generation(*, wait_for_inflight_requests: bool = False, **kwargs: Any) -> None:
        await pause(**({**kwargs, "mode": "wait"} if wait_for_inflight_requests else kwargs))

    return pause_generation


class ScaleRLReplica(vLLMReplica):
    """verl's replica with such servers, if it generates for the policy: reward models and teachers get verl's own."""

    http_server_class: type[vLLMHttpServer] = ScaleRLHttpServer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not (self.is_reward_model or self.is_teacher_model):
            self.server_class = ray.remote(self.http_server_class)
