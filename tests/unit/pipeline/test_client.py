# SPDX-License-Identifier: Apache-2.0
"""Requests that hang, generators that die: sent again, counted, and refused only after every attempt.

The servers and the balancer are stubs: Ray actors that hang or die on request cannot be had in a unit test; the
end-to-end fault tests kill real ones.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from omegaconf import OmegaConf

from scalerl_verl.cpu.vllm_alias import install_vllm_alias

install_vllm_alias()

from verl.workers.rollout.replica import TokenOutput  # noqa: E402

from scalerl_verl.errors import NoGeneratorError, RequestFailedError  # noqa: E402
from scalerl_verl.pipeline import client as client_module  # noqa: E402
from scalerl_verl.pipeline import failures  # noqa: E402
from scalerl_verl.pipeline.client import PipelineClient, is_dead_generator  # noqa: E402


class EngineDeadError(Exception):
    """Stands for vLLM's class of that name."""


class Remote:
    """An actor method: ``.remote(...)`` gives an awaitable."""

    def __init__(self, function: Any) -> None:
        self.remote = function


class StubServer:
    """Answers each call by the next entry of ``script``: an exception, ``hang``, ``abort`` or a list of tokens."""

    def __init__(self, script: list[Any], can_abort: bool = True) -> None:
        self.script, self.calls, self.aborted, self.can_abort = script, [], [], can_abort
        self.generate, self.abort_request = Remote(self._generate), Remote(self._abort)
        self.is_queued, self.queued = Remote(self._is_queued), []

    async def _generate(self, **call: Any) -> TokenOutput:
        self.calls.append(call)
        answer = self.script.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        if answer == "hang":
            await asyncio.sleep(3600)
        reason = "aborted" if answer == "abort" else "completed"
        tokens = [] if answer == "abort" else answer
        return TokenOutput(token_ids=tokens, log_probs=[], stop_reason=reason, extra_fields={})

    async def _is_queued(self, request_id: str, within_s: float) -> bool:
        return bool(self.queued and self.queued.pop(0))

    async def _abort(self, request_id: str) -> dict[str, Any]:
        self.aborted.append(request_id)
        return {"aborted": self.can_abort, "request_id": request_id}


class StubBalancer:
    """Sends each request to the first server that is left."""

    def __init__(self, servers: dict[str, StubServer]) -> None:
        self.servers, self.open = dict(servers), 0
        self.removed: list[str] = []
        self.coming: dict[str, StubServer] = {}
        self.num_empty = 0
        self.asked: list[str] = []
        self.require_acquire_fields = Remote(self._no_fields)
        self.require_release_fields = Remote(self._no_fields)
        self.acquire_server, self.remove_servers = Remote(self._acquire), Remote(self._remove)
        self.release_server = Remote(self._release)
        self.unreachable: list[str] = []
        self.reached: list[str] = []
        self.report_unreachable, self.report_reached = Remote(self._unreachable), Remote(self.reached.append)

    async def _no_fields(self) -> list[str]:
        return []

    async def _acquire(self, request_id: str) -> tuple[str, StubServer]:
        if not self.servers:
            self.num_empty += 1
            self.servers.update(self.coming)
            error = NoGeneratorError("no generator takes requests at the moment")
            raise ray.exceptions.RayTaskError("acquire_server", "traceback", error)
        self.asked.append(request_id)
        self.open += 1
        return next(iter(self.servers.items()))

    def _release(self, server_id: str) -> None:
        self.open -= 1

    async def _unreachable(self, server_id: str, max_strikes: int) -> float:
        self.unreachable.append(server_id)
        return 0.0

    async def _remove(self, server_ids: list[str]) -> None:
        self.removed += server_ids
        for server_id in server_ids:
            self.servers.pop(server_id, None)


def make_client(*servers: StubServer, timeout_s: float = 0.05) -> tuple[PipelineClient, StubBalancer]:
    balancer = StubBalancer({f"server-{i}": server for i, server in enumerate(servers)})
    section = {"request_timeout_s": timeout_s, "max_attempts": 3}
    config = OmegaConf.create({"trainer": {"v1": {"pipeline_rl": section}}})
    return PipelineClient(config, balancer), balancer  # type: ignore[arg-type]


def generate(client: PipelineClient, **more: Any) -> TokenOutput:
    sampling = more.pop("sampling_params", {"temperature": 1.0})
    return asyncio.run(client.generate("loop-1", prompt_ids=[1, 2], sampling_params=sampling, **more))


def dead_engine() -> ray.exceptions.RayTaskError:
    return ray.exceptions.RayTaskError("generate", "traceback", EngineDeadError("dead"))


def unreachable() -> ray.exceptions.ActorUnavailableError:
    return ray.exceptions.ActorUnavailableError("rpc timeout", b"0" * 16)


def test_request_that_answers_is_sent_once() -> None:
    server = StubServer([[7, 8]])
    client, balancer = make_client(server)
    output = generate(client)
    assert output.token_ids == [7, 8] and output.extra_fields["reissues"] == 0
    assert len(server.calls) == 1 and balancer.open == 0 and server.aborted == []


@pytest.mark.fault("one request stuck running: sampling waits for ever")
def test_one_request_stuck_running_is_timed_out_aborted_and_reissued() -> None:
    """Fault: one request stuck "running", and sampling waits for ever."""
    server = StubServer(["hang", [7]])
    client, balancer = make_client(server)
    output = generate(client)
    assert output.token_ids == [7] and output.extra_fields["reissues"] == 1
    first, second = (call["request_id"] for call in server.calls)
    assert server.aborted == [first] and first != second, "an id that is used twice would be mixed up in the engine"
    assert balancer.asked[0] != balancer.asked[1], "the balancer keeps an id on its server"
    assert balancer.open == 0


@pytest.mark.fault("abort and resume yield more tokens than the response length")
def test_second_attempt_has_the_whole_budget_and_no_more() -> None:
    """Fault: abort and resume gives more tokens than response_length."""
    server = StubServer(["hang", [7]])
    sampling = {"temperature": 1.0, "max_tokens": 5}
    generate(make_client(server)[0], sampling_params=sampling)
    for call in server.calls:
        assert call["prompt_ids"] == [1, 2] and call["sampling_params"] == {"temperature": 1.0, "max_tokens": 5}
    server.calls[0]["sampling_params"].clear()
    assert sampling == {"temperature": 1.0, "max_tokens": 5}, "the agent loop's own dict is not ours to hand out"


@pytest.mark.parametrize("death", [ray.exceptions.RayActorError(), dead_engine()], ids=["process", "engine"])
def test_request_of_a_dead_generator_goes_to_another(death: Exception) -> None:
    dying, living = StubServer([death]), StubServer([[9]])
    client, balancer = make_client(dying, living)
    output = generate(client)
    assert output.token_ids == [9] and output.extra_fields["reissues"] == 1
    assert balancer.removed == ["server-0"] and dying.aborted == []


def test_request_that_was_aborted_by_others_is_sent_again() -> None:
    output = generate(make_client(StubServer(["abort", [3]]))[0])
    assert output.token_ids == [3] and output.extra_fields["reissues"] == 1


def test_request_that_never_answers_fails_with_every_cause() -> None:
    server = StubServer(["hang", "abort", "hang"], can_abort=False)
    with pytest.raises(
        RequestFailedError, match=r"failed 3 times: no result from server-0 .*; server-0 aborted it; no"
    ):
        generate(make_client(server)[0])
    assert len(server.calls) == 3


def test_error_of_the_request_itself_is_not_tried_again() -> None:
    server = StubServer([ray.exceptions.RayTaskError("generate", "traceback", ValueError("prompt too long"))])
    client, balancer = make_client(server)
    with pytest.raises(ray.exceptions.RayTaskError):
        generate(client)
    assert len(server.calls) == 1 and balancer.removed == [] and balancer.open == 0


def test_media_are_refused() -> None:
    with pytest.raises(ValueError, match="image_data in a request"):
        generate(make_client(StubServer([]))[0], image_data=[SimpleNamespace()])
    assert generate(make_client(StubServer([[1]]))[0], image_data=None, video_data=[]).token_ids == [1]


def test_request_waits_for_a_generator_in_the_place_of_the_last_one_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "NO_GENERATOR_PAUSE_S", 0.01)
    client, balancer = make_client(StubServer([ray.exceptions.ActorDiedError()]), timeout_s=5)
    balancer.coming = {"server-1": StubServer([[1, 2]])}
    output = generate(client)
    assert output.token_ids == [1, 2] and output.extra_fields["reissues"] == 1
    assert balancer.removed == ["server-0"] and balancer.num_empty == 1


def test_request_for_which_no_generator_comes_fails_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "NO_GENERATOR_PAUSE_S", 0.01)
    client, _ = make_client()
    with pytest.raises(RequestFailedError, match=r"3 times: no generator came back within 0\.05 s"):
        generate(client)


def test_only_death_is_death() -> None:
    assert is_dead_generator(dead_engine()) and is_dead_generator(ray.exceptions.ActorDiedError())
    assert not is_dead_generator(ray.exceptions.RayTaskError("f", "t", ValueError()))
    assert not is_dead_generator(unreachable())


@pytest.mark.fault("the engine's ids are not ours: an abort does nothing and says nothing")
def test_abort_that_did_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Fault: the engine knows a request by another id, and aborting it is a silent no-op."""
    server = StubServer(["hang", [7]], can_abort=False)
    output = generate(make_client(server)[0])
    assert output.token_ids == [7], "another attempt does not depend on it"
    (first, _) = (call["request_id"] for call in server.calls)
    assert any(f"request {first} could not be aborted" in record.getMessage() for record in caplog.records)
    caplog.clear()
    generate(make_client(StubServer(["hang", [7]]))[0])
    assert not any("could not be aborted" in record.getMessage() for record in caplog.records)


def test_time_in_the_queue_is_no_hang() -> None:
    """Fault: requests time out behind others that wait for a slot, and go to the end of the queue each time."""
    server = StubServer(["hang", [7]])
    server.queued = [True, True, False]
    client, _ = make_client(server)
    output = generate(client)
    assert output.token_ids == [7] and output.extra_fields["reissues"] == 1
    assert server.queued == [], "two periods of waiting for a slot, and one with it"


def test_generator_out_of_reach_is_reported_and_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a passing network fault takes a generator out of the balancer for good."""
    monkeypatch.setattr(failures, "FIRST_PAUSE_S", 0.0)
    server = StubServer([unreachable(), unreachable(), [7], [8]])
    client, balancer = make_client(server)
    output = generate(client)
    assert output.token_ids == [7] and output.extra_fields["reissues"] == 2
    assert balancer.unreachable == ["server-0"] * 2 and balancer.removed == []
    assert balancer.reached == ["server-0"], "an answer clears its strikes"
    assert server.aborted == [call["request_id"] for call in server.calls[:2]], "the engine may have the lost ones"
    generate(client)
    assert balancer.reached == ["server-0"], "said once"


def test_attempts_that_reached_nobody_are_counted_by_strikes() -> None:
    """Three attempts are allowed, five strikes by default: a request outlives what its generator outlives."""
    server = StubServer([*[unreachable() for _ in range(5)], [7]])
    assert generate(make_client(server)[0]).token_ids == [7]
    server = StubServer([unreachable() for _ in range(9)])
    with pytest.raises(RequestFailedError, match="failed 6 times: server-0 could not be reached"):
        generate(make_client(server)[0])
