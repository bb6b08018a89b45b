# SPDX-License-Identifier: Apache-2.0
"""A generator whose connection breaks for a moment: its requests go elsewhere, and it stays.

Ray, the broken connection, our server class, verl's ``generate``, our balancer, client and weight updater are real; the
engines are stubs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from omegaconf import OmegaConf

from tests.faults.generator_actor import Replica, start_generators

pytest.importorskip("vllm")

from scalerl_verl.pipeline import weights
from scalerl_verl.pipeline.balancer import PipelineBalancer
from scalerl_verl.pipeline.client import PipelineClient
from scalerl_verl.pipeline.failures import strike_pause_s
from scalerl_verl.pipeline.returning import LeftOut
from scalerl_verl.pipeline.settings import PipelineSettings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def cut_connections(pid: int) -> int:
    """Break what connects this process with another; how many connections those were."""
    ours = {(c.laddr, c.raddr): c.fd for c in psutil.Process().net_connections("tcp") if c.raddr}
    fds = [ours.get((c.raddr, c.laddr)) for c in psutil.Process(pid).net_connections("tcp") if c.raddr]
    for fd in (fds := [fd for fd in fds if fd is not None]):
        with socket.socket(fileno=os.dup(fd)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    return len(fds)


@pytest.fixture(scope="module")
def generators() -> Iterator[list[Replica]]:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
    try:
        yield start_generators(2)
    finally:
        ray.shutdown()


def test_passing_network_fault_costs_no_generator(generators: list[Replica]) -> None:
    """Fault: one broken connection, and a generator idles for the rest of the run, counted and fed as before."""
    servers = {replica.server_address: replica.servers[0] for replica in generators}
    balancer = ray.remote(PipelineBalancer).options(num_cpus=0).remote(servers=servers)
    config = OmegaConf.create({"trainer": {"v1": {"pipeline_rl": {}}}})
    client = PipelineClient(config, balancer)

    async def send_and_cut() -> list[Any]:
        def send(name: str) -> asyncio.Task:
            return asyncio.ensure_future(client.generate(name, prompt_ids=[1, 2], sampling_params={}))

        answers = [send(f"r{number}") for number in range(8)]
        while await _count(servers, "num_running") != [4, 4]:
            await asyncio.sleep(0.1)
        first = generators[0].servers[0]
        assert cut_connections(await first.get_pid.remote()) >= 1
        while (await _count(servers, "num_running"))[1] != 8:
            await asyncio.sleep(0.1)
        later = [send(f"later{number}") for number in range(2)]
        while (await _count(servers, "num_running"))[1] != 10:
            await asyncio.sleep(0.1)
        assert await _count(servers, "num_aborted") == [4, 0], "the lost ones must not stay in its engine"
        await generators[1].servers[0].open_door.remote()
        return await asyncio.gather(*answers, *later)

    outputs = asyncio.run(send_and_cut())
    assert [output.token_ids for output in outputs] == [[7]] * 10
    assert sorted(output.extra_fields["reissues"] for output in outputs) == [0] * 6 + [1] * 4
    assert sorted(ray.get(balancer.get_all_servers.remote())) == sorted(servers), "one strike of five"
    _check_updater_agrees(balancer, generators)
    time.sleep(strike_pause_s(1))
    chosen = {ray.get(balancer.acquire_server.remote(request_id=f"x{number}"))[0] for number in range(2)}
    assert chosen == set(servers), "it gets requests again"


@pytest.mark.fault("a generator that hung for a while is lost for the rest of the run")
def test_generator_that_hung_is_asked_until_it_answers_and_one_that_died_is_not(generators: list[Replica]) -> None:
    """SIGSTOP, left out, SIGCONT: it has let go of its requests and serves new ones. Then SIGKILL."""
    dead: list[Replica] = []
    replica, left_out = generators[0], LeftOut(max_returns=2, limit_s=60, on_dead=dead.append)
    server = replica.servers[0]
    pid = ray.get(server.get_pid.remote())
    answer = server.generate.remote([1, 2], {}, "old")
    while not ray.get(server.num_running.remote()):
        time.sleep(0.05)
    os.kill(pid, signal.SIGSTOP)
    server.give_up.remote()
    left_out.add([replica])
    time.sleep(0.3)
    assert left_out.find_returned() == []
    os.kill(pid, signal.SIGCONT)
    assert wait_for(left_out.find_returned) == [replica]
    assert left_out.find_returned() == [], "it is asked no more"
    assert ray.get(answer, timeout=30).stop_reason == "aborted" and ray.get(server.num_running.remote()) == 0
    ray.get(server.open_door.remote())
    assert ray.get(server.generate.remote([1, 2], {}, "new"), timeout=30).token_ids == [7]
    left_out.add([replica])
    assert wait_for(left_out.find_returned) == [replica]
    assert dead == []
    left_out.add([replica])
    assert not left_out.num_asked and dead == [replica], "as often as it may come back"
    hung = LeftOut(max_returns=1, limit_s=0.5, on_dead=dead.append)
    os.kill(pid, signal.SIGSTOP)
    hung.add([replica])
    assert hung.find_returned() == [] and len(dead) == 1
    wait_for(lambda: hung.find_returned() or not hung.num_asked)
    assert dead == [replica] * 2, "it did not answer in time"
    os.kill(pid, signal.SIGKILL)
    other = LeftOut(max_returns=1, limit_s=60, on_dead=dead.append)
    other.add([replica])
    wait_for(lambda: other.find_returned() or not other.num_asked)
    assert dead == [replica] * 3


def wait_for(find: Callable[[], Any]) -> Any:
    began = time.monotonic()
    while not (found := find()):
        assert time.monotonic() - began < 60
        time.sleep(0.05)
    return found


def _check_updater_agrees(balancer: Any, generators: list[Replica]) -> None:
    config = SimpleNamespace(backend="gloo", custom_backend_module=None)
    lost: list[Any] = []
    updater = weights.WeightUpdater(
        config, SimpleNamespace(), generators, PipelineSettings(), lost.extend,  # type: ignore[arg-type]
        serving=lambda: ray.get(balancer.get_all_servers.remote()),
    )  # fmt: skip
    updater.check_generators()
    assert not lost and updater.replicas == generators


async def _count(servers: dict[str, Any], what: str) -> list[int]:
    return await asyncio.gather(*[_ask(getattr(server, what)) for server in servers.values()])


async def _ask(method: Any) -> int:
    for _ in range(20):  # the same connection carries this question
        try:
            return int(await method.remote())
        except ray.exceptions.ActorUnavailableError:
            await asyncio.sleep(0.1)
    raise AssertionError("the generator does not come back")
