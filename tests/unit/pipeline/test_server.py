# SPDX-License-Identifier: Apache-2.0
"""An abort of a request that is still on its way into the engine; tests/e2e/engine_updates.py has the real engine.

verl's ``generate`` is real. The engine is a stub: how long it takes a request in is what matters here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from scalerl_verl.cpu.vllm_alias import install_vllm_alias

install_vllm_alias()
pytest.importorskip("vllm")

from scalerl_verl.errors import RequestFailedError  # noqa: E402
from tests.pipeline_server import make_server  # noqa: E402


class StubEngine:
    """Takes a request in once ``door`` is open and generates nothing until it is aborted."""

    dead_error = RuntimeError("the engine is dead")

    def __init__(self) -> None:
        self.door, self.at_door = asyncio.Event(), asyncio.Event()
        self.running: dict[str, asyncio.Event] = {}
        self.output_processor = SimpleNamespace(request_states=self.running)

    async def add_request(self, request_id: str, *_: Any) -> Any:
        self.at_door.set()
        await self.door.wait()
        self.running[f"{request_id}-inner"] = asyncio.Event()
        return SimpleNamespace(request_id=f"{request_id}-inner")

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        queue = await self.add_request(request_id, prompt, sampling_params)
        ended = self.running.get(queue.request_id)
        if ended is not None:
            await ended.wait()
        output = SimpleNamespace(token_ids=[], logprobs=None, finish_reason="abort")
        yield SimpleNamespace(outputs=[output], num_cached_tokens=0, prompt_logprobs=None)

    async def abort(self, inner_ids: str | list[str], internal: bool) -> None:
        assert internal
        for name in [inner_ids] if isinstance(inner_ids, str) else inner_ids:
            if name in self.running:
                self.running.pop(name).set()


def run(check: Callable[[Any, asyncio.Task], Awaitable[None]], closed: bool = False) -> None:
    """``check`` a server that has been sent the request ``r``; in the end nothing of it is left."""

    async def main() -> None:
        server = make_server(StubEngine(), max_model_len=64, prompt_length=16, response_length=16)
        if closed:
            server._gate.clear()
        task = asyncio.create_task(server.generate([1, 2, 3], {}, "r"))
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(check(server, task), 20)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert not server._on_its_way | server._to_abort | set(server._inner_ids) | set(server.engine.running)
        assert server._num_entering == server._clock.num_open == 0

    asyncio.run(main())


def test_request_aborted_while_the_engine_takes_it_in_does_not_stay() -> None:
    async def check(server: Any, task: asyncio.Task) -> None:
        await server.engine.at_door.wait()
        assert (await server.abort_request("r"))["aborted"] is True
        server.engine.door.set()
        assert (await task).stop_reason == "aborted"

    run(check)


def test_request_that_a_hung_engine_takes_in_is_given_up_with_the_others() -> None:
    async def check(server: Any, task: asyncio.Task) -> None:
        await server.engine.at_door.wait()
        await server.give_up()
        server.engine.door.set()
        assert (await task).stop_reason == "aborted"

    run(check)


def test_request_aborted_at_the_gate_does_not_enter() -> None:
    async def check(server: Any, task: asyncio.Task) -> None:
        assert (await server.abort_request("r"))["aborted"] is True
        assert not task.done()
        server._gate.set()
        with pytest.raises(RequestFailedError, match="waited for a weight update"):
            await task
        assert not server.engine.at_door.is_set()

    run(check, closed=True)


def test_request_cancelled_at_the_gate_leaves_nothing_behind() -> None:
    async def check(server: Any, task: asyncio.Task) -> None:
        task.cancel()
        await asyncio.wait({task})
        assert (await server.abort_request("r"))["aborted"] is False

    run(check, closed=True)


def test_abort_of_a_running_request_still_ends_it() -> None:
    async def check(server: Any, task: asyncio.Task) -> None:
        server.engine.door.set()
        while "r" not in server._inner_ids:
            await asyncio.sleep(0)
        assert (await server.abort_request("r"))["aborted"] is True
        assert (await task).stop_reason == "aborted"

    run(check)
