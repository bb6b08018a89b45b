# SPDX-License-Identifier: Apache-2.0
"""The server of a generator over engines of different vLLM releases."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from scalerl_verl.cpu.vllm_alias import install_vllm_alias

install_vllm_alias()
pytest.importorskip("vllm")

from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402

from scalerl_verl.generator import frontend, server  # noqa: E402
from scalerl_verl.generator.server import ScaleRLHttpServer, take_old_pause  # noqa: E402


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # As verl aborts all requests, before each weight update of its asynchronous modes.
        ({"wait_for_inflight_requests": False, "clear_cache": True}, {"clear_cache": True}),
        ({"wait_for_inflight_requests": True, "clear_cache": False}, {"mode": "wait", "clear_cache": False}),
        ({"mode": "keep", "clear_cache": False}, {"mode": "keep", "clear_cache": False}),
    ],
)
def test_engine_without_verl_s_argument_takes_it(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """Fault: vLLM dropped an argument that verl passes, and every weight update of separate_async raised."""
    seen = []

    async def pause(*, mode: str = "abort", clear_cache: bool = True) -> None:
        seen.append({"mode": mode, "clear_cache": clear_cache})

    asyncio.run(take_old_pause(pause)(**given))
    assert seen == [{"mode": "abort", **expected}]


def test_engine_that_knows_the_argument_is_left_alone() -> None:
    async def pause(*, mode: str = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True) -> None:
        pass

    assert take_old_pause(pause) is pause


def test_installed_engine_takes_what_verl_passes() -> None:
    class Engine(AsyncLLM):
        def __init__(self) -> None:
            pass

    pause = take_old_pause(Engine().pause_generation)
    with pytest.raises(AttributeError):  # it gets as far as the engine that this one lacks
        asyncio.run(pause(wait_for_inflight_requests=False, clear_cache=False))


@pytest.mark.parametrize("is_fast", [True, False])
def test_facts_of_the_engine_s_workers_and_of_the_front_end_reach_the_run_s_records(
    is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts: list[tuple[str, Any]] = []
    monkeypatch.setattr(server.status, "add_fact", lambda name, entry: facts.append((name, entry)))

    async def start(self: Any, args: Any) -> None:
        """Stands for verl's, which starts an engine."""

    async def ask(method: str) -> list[dict[str, list[dict[str, int]]]]:
        assert method == "scalerl_facts"
        return [{"head": [{"rank": 0}]}, {"head": [{"rank": 1}]}]

    async def pause(*, mode: str = "abort") -> None: ...

    monkeypatch.setattr(ScaleRLHttpServer.__base__, "run_server", start)
    made: Any = object.__new__(ScaleRLHttpServer)
    made._is_fast, made.replica_rank = is_fast, 3
    made.engine = SimpleNamespace(collective_rpc=ask, pause_generation=pause, add_request=ask)
    asyncio.run(made.run_server(None))
    heads = [("head", {"rank": 0}), ("head", {"rank": 1})]
    assert facts == heads + ([(frontend.FACT, {"replica": 3})] if is_fast else [])
