# SPDX-License-Identifier: Apache-2.0
"""The sender's socket gives up with the cause when its peer is silent or has failed."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import zmq

from scalerl_verl.errors import WeightSyncError
from scalerl_verl.upstream.activation import DEFAULT_SYNC_TIMEOUT_S, SYNC_TIMEOUT_ENV, sync_timeout_s
from scalerl_verl.verl import weight_sync
from scalerl_verl.verl.weight_sync import WatchedSocket

TIMEOUT_S = 0.5


class StubReceiver:
    """Stands for the Ray reference of the engine's receiving call, and for ray.wait and ray.get on it."""

    def __init__(self, done: bool = False, error: Exception | None = None) -> None:
        self.done, self.error, self.num_asked = done, error, 0

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        assert references == [self] and timeout == 0, "a wait that blocks would delay the weights"
        self.num_asked += 1
        return (references, []) if self.done else ([], references)

    def get(self, reference: Any) -> None:
        assert reference is self
        if self.error is not None:
            raise self.error


@pytest.fixture
def sockets() -> Iterator[tuple[zmq.Socket, zmq.Socket]]:
    """A bound request socket and the connected reply socket, as verl's sender and receiver have them."""
    context = zmq.Context()
    address = f"inproc://{uuid.uuid4().hex}"
    request, reply = context.socket(zmq.REQ), context.socket(zmq.REP)
    request.bind(address)
    reply.connect(address)
    yield request, reply
    context.destroy(linger=0)


@pytest.fixture
def alone() -> Iterator[zmq.Socket]:
    """A bound request socket to which nobody connects."""
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.bind(f"inproc://{uuid.uuid4().hex}")
    yield socket
    context.destroy(linger=0)


def stub_ray(monkeypatch: pytest.MonkeyPatch, receiver: StubReceiver) -> StubReceiver:
    monkeypatch.setattr(ray, "wait", receiver.wait)
    monkeypatch.setattr(ray, "get", receiver.get)
    return receiver


def test_messages_pass_through_in_both_directions(sockets: tuple[zmq.Socket, zmq.Socket]) -> None:
    request, reply = sockets
    got = []

    def answer() -> None:
        for number in range(3):
            got.append(pickle.loads(reply.recv()))
            reply.send(b"answer %d" % number)

    peer = threading.Thread(target=answer)
    peer.start()
    watched = WatchedSocket(request, None, 10.0)
    answers = []
    for number in range(3):
        watched.send_pyobj({"bucket": number})
        answers.append(watched.recv())
    peer.join(timeout=10)
    assert got == [{"bucket": 0}, {"bucket": 1}, {"bucket": 2}]
    assert answers == [b"answer 0", b"answer 1", b"answer 2"]
    watched.close()
    assert request.closed


def test_slow_peer_with_a_living_receiver_is_waited_for(
    sockets: tuple[zmq.Socket, zmq.Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    request, reply = sockets
    receiver = stub_ray(monkeypatch, StubReceiver())

    def answer() -> None:
        reply.recv()
        time.sleep(0.5)
        reply.send(b"late")

    peer = threading.Thread(target=answer)
    peer.start()
    watched = WatchedSocket(request, receiver, 10.0)
    watched.send_pyobj(1)
    assert watched.recv() == b"late"
    peer.join(timeout=10)
    assert receiver.num_asked >= 1


def test_silent_peer_ends_the_update_after_the_time_out(sockets: tuple[zmq.Socket, zmq.Socket]) -> None:
    watched = WatchedSocket(sockets[0], None, TIMEOUT_S)
    watched.send_pyobj(1)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=rf"no sign of life for 0.5 s.*{SYNC_TIMEOUT_ENV}"):
        watched.recv()
    assert TIMEOUT_S <= time.monotonic() - began < 5


def test_peer_that_never_connects_ends_the_update_after_the_time_out(alone: zmq.Socket) -> None:
    with pytest.raises(WeightSyncError, match="no sign of life"):
        WatchedSocket(alone, None, TIMEOUT_S).send_pyobj(1)


@pytest.mark.parametrize("sending", [True, False])
def test_failed_receiver_ends_the_update_at_once_with_its_cause(
    alone: zmq.Socket, monkeypatch: pytest.MonkeyPatch, sending: bool
) -> None:
    cause = KeyError("lm_head.weight is unknown")
    receiver = stub_ray(monkeypatch, StubReceiver(done=True, error=cause))
    watched = WatchedSocket(alone, receiver, 600.0)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"failed to load the trainer's weights: .*lm_head\.weight") as error:
        watched.send_pyobj(1) if sending else watched.recv()
    assert error.value.__cause__ is cause
    assert time.monotonic() - began < 5


def test_receiver_that_returned_before_the_end_is_an_error(alone: zmq.Socket, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = stub_ray(monkeypatch, StubReceiver(done=True))
    with pytest.raises(WeightSyncError, match="ended its side of the weight update"):
        WatchedSocket(alone, receiver, 600.0).send_pyobj(1)


def test_closing_does_not_wait_for_undelivered_messages() -> None:
    """A stub socket: with any other linger time the process stays alive while a message has no taker."""

    class StubSocket:
        def close(self, linger: int | None = None) -> None:
            self.linger = linger

    socket = StubSocket()
    WatchedSocket(socket, None, TIMEOUT_S).close()
    assert socket.linger == 0


def test_patched_sender_watches_the_receiver_of_its_own_update(
    sockets: tuple[zmq.Socket, zmq.Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stubs for verl's adapter and sender: the reference of the non-blocking call reaches the socket made after it."""
    builders = {spec.target: spec.build for spec in weight_sync.SPECS}
    monkeypatch.setenv(SYNC_TIMEOUT_ENV, "7.5")

    class StubAdapter:
        async def execute(self, method: str, non_block: bool = False) -> str:
            return f"reference of {method}"

    class StubSender:
        def init_socket(self) -> None:
            self.socket = sockets[0]

    execute = builders["ServerAdapter._execute_method"](StubAdapter.execute, None)
    init_socket = builders["BucketedWeightSender._init_socket"](StubSender.init_socket, None)

    async def update(non_block: bool) -> WatchedSocket:
        assert await execute(StubAdapter(), "update", non_block=non_block) == "reference of update"
        sender = StubSender()
        init_socket(sender)
        return sender.socket

    watched = asyncio.run(update(non_block=True))
    assert isinstance(watched, WatchedSocket)
    assert watched._receiver == "reference of update"
    assert watched._timeout_s == 7.5
    assert asyncio.run(update(non_block=False))._receiver is None


@pytest.mark.parametrize(
    ("text", "expected"), [("", DEFAULT_SYNC_TIMEOUT_S), ("30", 30.0), ("0.5", 0.5), ("1e3", 1000.0)]
)
def test_time_out_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, expected: float) -> None:
    monkeypatch.setenv(SYNC_TIMEOUT_ENV, text)
    assert sync_timeout_s() == expected


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "10s"])
def test_time_out_that_is_no_positive_number_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(SYNC_TIMEOUT_ENV, text)
    with pytest.raises(ValueError, match=rf"{SYNC_TIMEOUT_ENV}='{text}' must be a positive number of seconds"):
        sync_timeout_s()
