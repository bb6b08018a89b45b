# SPDX-License-Identifier: Apache-2.0
"""The fast front end: which requests it changes and how, where it is refused, and when verl's count of requests on
their way into the engine ends. Our server and verl's ``generate`` are real, the engine is a stub."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from scalerl_verl.cpu.vllm_alias import install_vllm_alias

install_vllm_alias()
pytest.importorskip("vllm")

from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine.output_processor import RequestOutputCollector  # noqa: E402

from scalerl_verl.errors import ScaleRLConfigError  # noqa: E402
from scalerl_verl.generator import frontend  # noqa: E402
from scalerl_verl.generator.server import ScaleRLHttpServer, ScaleRLReplica  # noqa: E402
from scalerl_verl.pipeline.server import PipelineHttpServer, PipelineReplica  # noqa: E402
from tests.pipeline_server import make_server  # noqa: E402
from tests.unit.composed import ROLLOUT, Refusal, changed, check_refusal, find_problems  # noqa: E402

KEY = "algorithm.scalerl.fast_frontend"
FINAL = RequestOutputKind.FINAL_ONLY


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"detokenize": False, "flat_logprobs": True}),
        ({"stop": []}, {"detokenize": False, "flat_logprobs": True}),
        ({"stop": ["</s>"]}, {"flat_logprobs": True}),
        ({"stop": "</s>"}, {"flat_logprobs": True}),
        ({"detokenize": True}, {"flat_logprobs": True}),
        ({"n": 1}, {"detokenize": False, "flat_logprobs": True}),
        ({"prompt_logprobs": 0}, {"detokenize": False}),
    ],
)
def test_request_is_answered_once_and_has_text_only_where_it_is_looked_at(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    before = dict(given)
    assert frontend.final_only(given) == {**given, **expected, "output_kind": FINAL}
    assert given == before, "the parameters are the caller's"


@pytest.mark.parametrize("given", [{"n": 2}, {"output_kind": RequestOutputKind.DELTA}])
def test_request_that_one_answer_would_change_stays_as_it_is(given: dict[str, Any]) -> None:
    assert frontend.final_only(given) is None


REFUSALS: dict[str, Refusal] = {
    "another rollout": ("fast_frontend", {f"{ROLLOUT}.name": "sglang"}, [f"{ROLLOUT}.name=sglang", f"set {KEY}=False"]),
    "prefill apart": ("fast_frontend", {f"{ROLLOUT}.disaggregation.enabled": True}, [f"set {KEY}=False"]),
    "no section for the mark": ("fast_frontend", {f"{ROLLOUT}.custom": [1]}, [f"{ROLLOUT}.custom=", "set it to null"]),
    "no truth value": ("", {KEY: "yes"}, [f"{KEY}='yes'", "True or False"]),
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_contradiction_is_refused_with_the_key_to_change(fault: str) -> None:
    check_refusal(*REFUSALS[fault])


def test_switched_off_it_is_checked_nowhere_and_told_to_nobody() -> None:
    config = changed("fast_frontend", {KEY: False, f"{ROLLOUT}.name": "sglang"})
    assert find_problems(config) == []
    frontend.complete(config)
    assert "custom" not in config.actor_rollout_ref.rollout


@pytest.mark.parametrize("preset", ["fast_frontend", "recipe", "scalerl"])
def test_servers_of_a_preset_learn_of_it(preset: str) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    config = changed(preset, {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.custom": {"theirs": 1}})
    assert not frontend.is_marked(omega_conf_to_dataclass(config.actor_rollout_ref.rollout))
    frontend.complete(config)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert frontend.is_marked(rollout) and rollout.custom["theirs"] == 1


@pytest.mark.parametrize("custom", [None, {}, {"theirs": 1}, [1], "theirs"])
def test_settings_of_others_are_theirs_whatever_they_are(custom: Any) -> None:
    """Fault: a server of a run without the fast front end ended on a list or a text, which verl takes."""
    assert not frontend.is_marked(SimpleNamespace(custom=custom))


def trainer_of(replica: Any, is_asked: bool = True) -> Any:
    manager = SimpleNamespace(get_replicas=lambda: [replica])
    config = changed("fast_frontend", {KEY: is_asked})
    return SimpleNamespace(config=config, _rollout_server_managers=lambda: [manager])


@pytest.mark.parametrize("cls", [ScaleRLReplica, PipelineReplica])
def test_generators_of_ours_pass(cls: type) -> None:
    frontend.check_replicas(trainer_of(object.__new__(cls)))


def test_generators_of_somebody_else_are_an_error_that_names_them() -> None:
    with pytest.raises(ScaleRLConfigError, match=r"SimpleNamespace.*" + KEY):
        frontend.check_replicas(trainer_of(SimpleNamespace()))
    frontend.check_replicas(trainer_of(SimpleNamespace(), is_asked=False))


class StubEngine:
    """In place of vLLM's: vLLM's own queue of a request; what is put there is up to the test."""

    def __init__(self) -> None:
        self.queues: dict[str, RequestOutputCollector] = {}
        self.params: dict[str, Any] = {}
        self.early: Any = None
        self.engine_core = SimpleNamespace()

    async def add_request(self, request_id: str, prompt: Any, params: Any) -> RequestOutputCollector:
        queue = self.queues[request_id] = RequestOutputCollector(params.output_kind, f"{request_id}-inner")
        self.params[request_id] = params
        if self.early is not None:
            queue.put(self.early)
        return queue

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        queue = await self.add_request(request_id, prompt, sampling_params)
        finished = False
        while not finished:  # as vLLM's AsyncLLM.generate does
            output = queue.get_nowait() or await queue.get()
            finished = output.finished
            yield output


def answer(reason: str = "stop") -> Any:
    from vllm.outputs import CompletionOutput, RequestOutput

    completion = CompletionOutput(0, "", [7], None, None, finish_reason=reason)
    return RequestOutput("r", None, [1], None, [completion], finished=True, num_cached_tokens=5)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("cls", [ScaleRLHttpServer, PipelineHttpServer])
def test_request_is_no_longer_on_its_way_once_the_engine_has_it(cls: type) -> None:
    """Fault: an abort of all requests waits up to a minute for each that runs or waits for a slot."""

    async def main() -> None:
        server = make_server(StubEngine(), 64, 16, 16, cls=cls, fast=True)
        task = asyncio.ensure_future(server.generate([1, 2], {}, "r"))
        await settle()
        assert "r" in server.engine.queues and not task.done()
        assert server._admitting == 0 and not server._unannounced
        server.engine.queues["r"].put(answer())
        output = await task
        assert (output.token_ids, output.stop_reason, output.extra_fields["num_cached_tokens"]) == ([7], "completed", 5)
        assert server._admitting == 0

    asyncio.run(main())


class SharedIdEngine(StubEngine):
    """Takes requests in only after others had their turn, as vLLM does while it waits for its engine."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[RequestOutputCollector] = []

    async def add_request(self, request_id: str, prompt: Any, params: Any) -> RequestOutputCollector:
        await asyncio.sleep(0)
        queue = await super().add_request(request_id, prompt, params)
        self.taken.append(queue)
        return queue


def test_requests_that_share_one_id_are_each_let_out_of_the_count() -> None:
    """verl's ``rollout.full_determinism`` names every request of the V1 trainer ``det-0``.

    Fault: only the first is announced, and an abort of all waits a minute for the others.
    """

    async def main() -> None:
        server = make_server(SharedIdEngine(), 64, 16, 16, cls=ScaleRLHttpServer, fast=True)
        tasks = [asyncio.ensure_future(server.generate([1, 2], {}, "det-0")) for _ in range(3)]
        await settle()
        assert len(server.engine.taken) == 3 and server._admitting == 0 and not server._unannounced
        for queue in server.engine.taken:
            queue.put(answer())
        assert [output.token_ids for output in await asyncio.gather(*tasks)] == [[7]] * 3

    asyncio.run(main())


def test_answer_that_is_there_before_the_request_is_announced_stays_whole() -> None:
    async def main() -> None:
        server = make_server(StubEngine(), 64, 16, 16, cls=ScaleRLHttpServer, fast=True)
        server.engine.early = answer("abort")
        output = await asyncio.wait_for(server.generate([1, 2], {}, "r"), 20)
        assert (output.token_ids, output.stop_reason, output.extra_fields["num_cached_tokens"]) == ([7], "aborted", 5)
        assert server._admitting == 0 and not server._unannounced

    asyncio.run(main())


def test_error_that_is_there_before_the_request_is_announced_is_raised() -> None:
    async def main() -> None:
        server = make_server(StubEngine(), 64, 16, 16, cls=ScaleRLHttpServer, fast=True)
        server.engine.early = ValueError("the engine died")
        with pytest.raises(ValueError, match="the engine died"):
            await asyncio.wait_for(server.generate([1, 2], {}, "r"), 20)
        assert server._admitting == 0 and not server._unannounced

    asyncio.run(main())


@pytest.mark.parametrize(("fast", "params"), [(False, {}), (True, {"n": 2})], ids=["off", "several responses"])
def test_request_in_verls_way_is_left_alone(fast: bool, params: dict[str, Any]) -> None:
    async def main() -> None:
        server = make_server(StubEngine(), 64, 16, 16, cls=ScaleRLHttpServer, fast=fast)
        task = asyncio.ensure_future(server.generate([1, 2], dict(params), "r"))
        await settle()
        sent = server.engine.params["r"]
        assert sent.output_kind == RequestOutputKind.CUMULATIVE and sent.detokenize
        assert server.engine.queues["r"].output is None and server._admitting == 1
        server.engine.queues["r"].put(answer())
        assert (await task).token_ids == [7]

    asyncio.run(main())


def test_request_of_the_http_endpoint_is_left_alone() -> None:
    async def main() -> None:
        server = make_server(StubEngine(), 64, 16, 16, cls=ScaleRLHttpServer, fast=True)
        params = SimpleNamespace(output_kind=FINAL)  # what it asks for where a client does not stream
        queue = await server.engine.add_request("http", {"prompt_token_ids": [1]}, params)
        assert queue.output is None

    asyncio.run(main())


@pytest.mark.parametrize(
    ("cls", "flags", "expected"),
    [
        (ScaleRLReplica, {}, ScaleRLHttpServer),
        (ScaleRLReplica, {"is_reward_model": True}, None),
        (ScaleRLReplica, {"is_teacher_model": True}, None),
        (PipelineReplica, {}, PipelineHttpServer),
    ],
)
def test_only_the_policy_is_served_by_our_class(cls: type, flags: dict[str, bool], expected: type | None) -> None:
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    config = changed("", {f"{ROLLOUT}.name": "vllm"}).actor_rollout_ref.rollout
    replica = cls(replica_rank=0, config=config, model_config=None, **flags)
    launched = replica.server_class.__ray_metadata__.modified_class
    assert (expected or vLLMHttpServer) in launched.__mro__
    assert expected is not None or not issubclass(launched, ScaleRLHttpServer)
