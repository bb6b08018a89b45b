# SPDX-License-Identifier: Apache-2.0
"""What a generator's server remembers of requests, and which of them it calls waiting.

Our server and verl's ``generate`` are real; the engine is a stub that answers when it is told to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.faults.generator_actor import StubEngine
from tests.pipeline_server import make_server

HOUR = 3600.0


def run(check: Callable[[Any], Awaitable[None]]) -> None:
    async def main() -> None:
        await check(make_server(StubEngine(), max_model_len=64, prompt_length=16, response_length=16))

    asyncio.run(main())


def send(server: Any, name: str) -> asyncio.Task:
    return asyncio.ensure_future(server.generate([1, 2, 3], {}, name))


async def read_all(outputs: Any) -> list[Any]:
    return [output async for output in outputs]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def finish(server: Any, name: str) -> None:
    server.engine.finish(f"{name}-inner")


def test_requests_of_the_http_endpoint_are_not_remembered() -> None:
    """Fault: every request over verl's OpenAI endpoint stays in the version log for ever."""

    async def check(server: Any) -> None:
        for number in range(1000):  # vLLM's front end, which the endpoint calls, enters here
            await server.engine.add_request(f"http-{number}", {"prompt_token_ids": [1]}, None)
        ours = send(server, "ours")
        await settle()
        entered = server.engine.entered
        assert {prompt["cache_salt"] for prompt in entered} == {"weights--1"} and len(entered) == 1001
        assert len(server._log._runs) == 1 and set(server._inner_ids) == {"ours"}
        update = await server.swap(1, [b""], False)
        assert update["kept_requests"] == 1001, "they are kept over an update all the same"
        finish(server, "ours")
        assert (await ours).extra_fields["versions"] == [[1, 1]]
        assert not server._log._runs | server._inner_ids | server._turns

    run(check)


async def answer(server: Any, name: str, task: asyncio.Task) -> None:
    finish(server, name)


async def abort(server: Any, name: str, task: asyncio.Task) -> None:
    assert (await server.abort_request(name))["aborted"]


async def hang_up(server: Any, name: str, task: asyncio.Task) -> None:
    task.cancel()


async def break_off(server: Any, name: str, task: asyncio.Task) -> None:
    server.engine.error = ValueError("a request that the engine cannot go on with")
    finish(server, name)


@pytest.mark.parametrize("end", [answer, abort, hang_up, break_off])
@pytest.mark.parametrize("over_http", [True, False], ids=["http", "ray"])
def test_request_that_ended_is_forgotten_however_it_ended(end: Any, over_http: bool) -> None:
    """Fault: the version log keeps a request that was aborted, that failed, or whose client is gone."""

    async def check(server: Any) -> None:
        if over_http:
            task = asyncio.ensure_future(read_all(server.engine.generate({"prompt_token_ids": [1]}, None, "r")))
        else:
            task = send(server, "r")
        await settle()
        assert len(server._log._runs) == (not over_http)
        if not (over_http and end is abort):  # whoever sent it over HTTP aborts it by hanging up
            await end(server, "r", task)
        else:
            await server.engine.abort("r-inner", internal=True)
        await asyncio.wait([task], timeout=20)
        assert task.done()
        left = [server._inner_ids, server._turns, server._to_abort, server._on_its_way, server._log._final]
        assert len(server._log._runs) == server._clock.num_open == server._num_entering == 0 and not any(left)
        task.cancelled() or task.exception()

    run(check)


def test_request_that_the_engine_refuses_is_forgotten() -> None:
    async def check(server: Any) -> None:
        async def refuse(*_: Any) -> Any:
            raise ValueError("no such parameter")

        server._add_request = refuse
        with pytest.raises(ValueError, match="no such parameter"):
            await send(server, "r")
        assert len(server._log._runs) == server._clock.num_open == server._num_entering == 0
        assert not server._inner_ids and not server._turns and not server._on_its_way

    run(check)


def test_engine_that_is_given_up_lets_go_of_every_request() -> None:
    async def check(server: Any) -> None:
        await server.engine.add_request("http", {"prompt_token_ids": [1]}, None)
        ours = send(server, "ours")
        await settle()
        await server.give_up()
        assert (await ours).stop_reason == "aborted"
        assert not server.engine.running and not server._to_abort

    run(check)


def test_request_waits_for_its_turn_and_not_longer() -> None:
    """Fault: waiting for a slot is taken for a hang; and a hang must not be taken for waiting."""

    async def check(server: Any) -> None:
        tasks = [send(server, name) for name in "abcd"]
        await settle()
        assert not await server.is_queued("a", HOUR), "nothing is before it"
        assert await server.is_queued("b", HOUR) and await server.is_queued("c", HOUR)
        assert not await server.is_queued("c", 0.0), "an engine that stands still"
        server.engine.running["b-inner"].is_prefilling = False
        assert not await server.is_queued("b", HOUR), "it has a slot"
        finish(server, "a")
        await tasks[0]
        assert await server.is_queued("c", HOUR)
        finish(server, "d")
        await tasks[3]
        assert not await server.is_queued("c", HOUR), "as many have ended as were before it: it was passed over"
        assert not await server.is_queued("unknown", HOUR)
        finish(server, "b")
        finish(server, "c")
        await asyncio.gather(*tasks)
        assert not server._turns

    run(check)


def test_request_at_the_gate_of_an_update_waits() -> None:
    async def check(server: Any) -> None:
        first, other = send(server, "first"), send(server, "other")
        await settle()
        server._gate.clear()
        late = send(server, "late")
        await settle()
        finish(server, "first")
        await settle()
        assert await server.is_queued("late", HOUR)
        server._gate.set()
        finish(server, "other")
        await settle()
        finish(server, "late")
        await asyncio.gather(first, other, late)

    run(check)
