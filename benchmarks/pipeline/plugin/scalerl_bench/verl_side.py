# SPDX-License-Identifier: Apache-2.0
"""Two runs at a time on one host.

verl's rollout worker hands weights to its engine over a socket in /tmp that is named by Ray's job number and the
replica's. Two runs with a Ray of their own are both job 1: they would take each other's weights. The run's name
(BENCH_LANE) makes the sockets differ.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from scalerl_verl.upstream.import_hooks import after_import


def _own_socket(handle: str) -> str:
    return handle.replace("rl-colocate-zmq", f"{os.environ['BENCH_LANE']}-zmq")


def _sender(module: ModuleType) -> None:
    original = module.ServerAdapter.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.zmq_handle = _own_socket(self.zmq_handle)

    module.ServerAdapter.__init__ = init


def _receiver(module: ModuleType) -> None:
    extension = module.vLLMColocateWorkerExtension
    original = extension._get_zmq_handle
    extension._get_zmq_handle = lambda self: _own_socket(original(self))


if os.environ.get("BENCH_LANE"):
    after_import("verl.workers.rollout.vllm_rollout.vllm_rollout", _sender)
    after_import("verl.workers.rollout.vllm_rollout.utils", _receiver)
