# SPDX-License-Identifier: Apache-2.0
"""A thread that reads a real ZMQ subscription is ended by another one; tests/faults/test_relays.py has transfers."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from scalerl_verl.errors import WeightSyncError
from scalerl_verl.pipeline.endable import EndableSocket


@pytest.fixture
def sockets() -> Iterator[tuple[Any, Any]]:
    with zmq.Context() as context, context.socket(zmq.XPUB) as sender:
        port = sender.bind_to_random_port("tcp://127.0.0.1")
        reader = context.socket(zmq.SUB)
        reader.connect(f"tcp://127.0.0.1:{port}")
        reader.setsockopt_string(zmq.SUBSCRIBE, "bucket")
        assert sender.recv() == b"\x01bucket"
        yield sender, reader
        reader.close(linger=0)


def read(socket: EndableSocket, seen: queue.Queue[Any]) -> None:
    try:
        while True:
            seen.put((socket.recv_string(), socket.recv_pyobj()))
    except WeightSyncError as error:
        seen.put(error)


def test_reader_gets_what_is_sent_until_it_is_ended(sockets: tuple[Any, Any]) -> None:
    sender, reader = sockets
    socket, seen = EndableSocket(reader), queue.Queue[Any]()
    thread = threading.Thread(target=read, args=(socket, seen), daemon=True)
    thread.start()
    sender.send_string("bucket", flags=zmq.SNDMORE)
    sender.send_pyobj({"length": 3})
    assert seen.get(timeout=30) == ("bucket", {"length": 3})
    socket.end()
    assert isinstance(seen.get(timeout=30), WeightSyncError)
    thread.join(timeout=30)
    assert reader.closed and not thread.is_alive()


@pytest.mark.fault("a generator's worker hangs in garbage collection after a transfer that failed")
def test_socket_that_was_ended_can_be_collected_before_its_context() -> None:
    """As an error's traceback keeps them: in a cycle, of which the garbage collector may end the context first."""
    reader = zmq.Context().socket(zmq.SUB)
    reader.connect("tcp://127.0.0.1:9")
    EndableSocket(reader).end()
    cycle: list[Any] = [reader]
    cycle.append(cycle)
    del reader, cycle
    thread = threading.Thread(target=gc.collect, daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
