# SPDX-License-Identifier: Apache-2.0
"""End a run whose generator cannot load the weights, with the cause, instead of waiting for ever.

verl's sender talks to the engine over a blocking ZMQ request socket. If the engine's side raises (or dies), no
reply ever comes, and the exception sits in a future nobody looks at while the trainer waits.
"""

from __future__ import annotations

import contextvars
import functools
import time
from types import ModuleType
from typing import Any

from scalerl_verl.errors import WeightSyncError
from scalerl_verl.upstream.activation import SYNC_TIMEOUT_ENV, sync_timeout_s
from scalerl_verl.upstream.spec import PatchSpec

_POLL_MS = 200

_receiver: contextvars.ContextVar[Any] = contextvars.ContextVar("scalerl_receiver", default=None)


class WatchedSocket:
    """A ZMQ request socket that gives up when its peer has failed or stays silent too long.

    Args:
        socket: the bound ``zmq.REQ`` socket.
        receiver: Ray reference of the receiver's call, or None on ranks that did not make it.
        timeout_s: seconds of silence that are too long.
    """

    def __init__(self, socket: Any, receiver: Any, timeout_s: float) -> None:
        self._socket = socket
        self._receiver = receiver
        self._timeout_s = timeout_s

    def send_pyobj(self, value: object) -> None:
        self._wait(writing=True)
        self._socket.send_pyobj(value)

    def recv(self) -> bytes:
        self._wait(writing=False)
        return self._socket.recv()

    def close(self) -> None:
        # Undelivered messages must not keep the process alive when the peer is gone.
        self._socket.close(linger=0)

    def _wait(self, writing: bool) -> None:
        import zmq

        event = zmq.POLLOUT if writing else zmq.POLLIN
        deadline = time.monotonic() + self._timeout_s
        while not self._socket.poll(_POLL_MS, event):
            self._check_receiver(event)
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"the generator gave no sign of life for {self._timeout_s:g} s during a weight update. Look for an "
                    f"earlier error of the vLLM engine in this log; if loading is just slow, raise {SYNC_TIMEOUT_ENV}."
                )

    def _check_receiver(self, event: int) -> None:
        if self._receiver is None:
            return
        import ray

        done, _ = ray.wait([self._receiver], timeout=0)
        if not done:
            return
        try:
            ray.get(self._receiver)
        except Exception as error:
            # Ray renders the whole remote traceback, which `from error` keeps; its last line is the cause.
            cause = str(error).strip().splitlines()[-1]
            raise WeightSyncError(f"the generator failed to load the trainer's weights: {cause}") from error
        if self._socket.poll(0, event):
            return  # its last reply came in between
        raise WeightSyncError(
            "the generator ended its side of the weight update before all weights were sent. Look for an earlier error "
            "of the vLLM engine in this log"
        )


def _build_execute(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    async def _execute_method(self: Any, method: str, non_block: bool = False, **kwargs: Any) -> Any:
        result = await original(self, method, non_block=non_block, **kwargs)
        if non_block:
            _receiver.set(result)
        return result

    return _execute_method


def _build_socket(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def _init_socket(self: Any) -> None:
        original(self)
        self.socket = WatchedSocket(self.socket, _receiver.get(), sync_timeout_s())

    return _init_socket


def _build_receive(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def receive_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except BufferError as error:
            # Closing shared memory that tensors of the failed load still point to; the load's own error is the cause.
            if error.__context__ is not None:
                raise error.__context__ from None
            raise

    return receive_weights


SPECS = (
    PatchSpec(
        name="verl.weight_sync.receiver",
        module="verl.workers.rollout.vllm_rollout.vllm_rollout",
        target="ServerAdapter._execute_method",
        build=_build_execute,
        kind="wrap",
        why="verl awaits the engine's receiving call only after all weights were sent. Our code keeps its future, to "
        "see a failure while sending.",
        sources=("21ce53922cda0fdb736719438c47971874d734dc331291a62c1dfdd08b641998",),
        removal="verl watches the receiver while it sends",
        late_ok=True,
    ),
    PatchSpec(
        name="verl.weight_sync.sender",
        module="verl.workers.rollout.vllm_rollout.bucketed_weight_transfer",
        target="BucketedWeightSender._init_socket",
        build=_build_socket,
        kind="wrap",
        why="The sender blocks in recv(), which hangs for ever if the engine failed to load a bucket.",
        sources=("456addd6e180d29b43abb76fe8d4eb5771b055b04646100c3f55cb15f1915389",),
        removal="verl gives its transfer socket a time-out and reports the receiver's error",
        late_ok=True,
    ),
    PatchSpec(
        name="verl.weight_sync.cause",
        module="verl.workers.rollout.vllm_rollout.bucketed_weight_transfer",
        target="BucketedWeightReceiver.receive_weights",
        build=_build_receive,
        kind="wrap",
        why="If loading a bucket fails, closing the shared memory fails too, and that BufferError hides the cause.",
        sources=("5bea733ba6ca24761759dfb2d4c0449c54d50601c421adaded3b898f73a75250",),
        removal="verl releases its tensors before it closes the shared memory",
        late_ok=True,
    ),
)
