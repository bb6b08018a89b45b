# SPDX-License-Identifier: Apache-2.0
"""A socket whose reader can be ended by another thread."""

from __future__ import annotations

import threading
from typing import Any

from scalerl_verl.errors import WeightSyncError

POLL_S = 0.1
"""Seconds between looks whether the reader shall end."""


class EndableSocket:
    """In the place of the ZMQ socket from which verl's NCCL engine reads what each bucket holds.

    verl reads it in a thread, without a time-out. After a transfer that failed, that thread would wait for the next
    transfer, take its first message, and broadcast once more than the others.

    verl does not close it either. What failed in a transfer keeps the socket in a cycle of references, with its
    context; the garbage collector then ends the context first, which waits for the socket to be closed: for ever.

    Args:
        socket: a subscribed ZMQ socket, which nobody but this object touches from here on.
    """

    def __init__(self, socket: Any) -> None:
        self._socket, self._ended, self._lock = socket, threading.Event(), threading.Lock()

    def recv_string(self) -> str:
        """ZMQ's.

        Raises:
            WeightSyncError: the transfer was ended.
        """
        with self._lock:
            self._wait()
            return str(self._socket.recv_string())

    def recv_pyobj(self) -> Any:
        """ZMQ's.

        Raises:
            WeightSyncError: the transfer was ended.
        """
        with self._lock:
            self._wait()
            return self._socket.recv_pyobj()

    def end(self) -> None:
        """Let the reader raise, within `POLL_S`, and close the socket."""
        self._ended.set()
        with self._lock:
            self._socket.close(linger=0)

    def _wait(self) -> None:
        while True:
            if self._ended.is_set():
                raise WeightSyncError("the transfer of weights was ended by its driver")
            if self._socket.poll(1000 * POLL_S):
                return
