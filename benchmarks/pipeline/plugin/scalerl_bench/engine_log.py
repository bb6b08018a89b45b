# SPDX-License-Identifier: Apache-2.0
"""What a vLLM engine did, in bins of 50 ms: model steps, tokens decoded, prefilled, and of these prefilled again.

One line a bin with at least one step: ``bin steps decoded prefilled again``; a bin's number is its Unix time over its
width. A prefill is one *again* if its request has sampled tokens already (it was preempted) or came with a prompt that
the data do not have (it was aborted, and sent again with the tokens it had).
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from scalerl_verl.upstream.import_hooks import after_import

BIN_S = 0.05
FLUSH_S = 1.0


class EngineLog:
    """Sums over the bin that is under way; written when the next one begins."""

    def __init__(self, stream: TextIO, prompt_tokens: frozenset[int]) -> None:
        self._stream, self._prompt_tokens = stream, prompt_tokens
        self._bin, self._sums, self._flushed_at = 0, [0, 0, 0, 0], time.time()

    def add(self, requests: dict[str, Any], scheduled: dict[str, int]) -> None:
        """A model step over ``scheduled`` (request -> tokens)."""
        now = time.time()
        if (current := int(now / BIN_S)) != self._bin:
            self._end_bin(current, now)
        self._sums[0] += 1
        for name, count in scheduled.items():
            if count == 1:  # a prefill of a single token, the last of a prompt, counts as decoding
                self._sums[1] += 1
                continue
            self._sums[2] += count
            request = requests[name]
            if request.num_output_tokens or request.num_prompt_tokens not in self._prompt_tokens:
                self._sums[3] += count

    def _end_bin(self, current: int, now: float) -> None:
        if self._sums[0]:
            print(self._bin, *self._sums, file=self._stream)
        self._bin, self._sums = current, [0, 0, 0, 0]
        if now - self._flushed_at > FLUSH_S:
            self._stream.flush()
            self._flushed_at = now


def _watch(module: ModuleType) -> None:
    original = module.Scheduler.schedule
    folder = Path(os.environ["BENCH_ENGINE_LOG"])
    prompt_tokens = frozenset(map(int, os.environ["BENCH_PROMPT_TOKENS"].split(",")))
    logs: list[EngineLog] = []

    @functools.wraps(original)
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if output.total_num_scheduled_tokens:
            if not logs:
                logs.append(
                    EngineLog((folder / f"engine-{os.getpid()}.txt").open("w", encoding="utf-8"), prompt_tokens)
                )
            logs[0].add(self.requests, output.num_scheduled_tokens)
        return output

    module.Scheduler.schedule = schedule


def register() -> None:
    """Called by vLLM in every process, maybe more than once."""
    global _registered
    if os.environ.get("BENCH_ENGINE_LOG") and not _registered:
        _registered = True
        after_import("vllm.v1.core.sched.scheduler", _watch)


_registered = False
