# SPDX-License-Identifier: Apache-2.0
"""Turns of the ways to ask for tokens: which come next, what one costs in time and memory, and their rows."""

from __future__ import annotations

import argparse
import contextlib
import gc
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.rows import append_rows

VERL, OURS, ENGINE, LIBRARY = "verl", "scalerl_verl", "engine alone", "LLM.generate"
SERVED = (VERL, OURS, ENGINE)
WAYS = (*SERVED, LIBRARY)
WARM_UP_TOKENS = 48


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


@contextlib.contextmanager
def measured() -> Iterator[dict[str, float]]:
    """What a block costs this process, as the columns of a row; they are there once it has ended.

    Seconds, seconds of a processor, and by how many MiB its resident memory grew at most (five looks a second).
    """
    process, is_over = psutil.Process(), threading.Event()

    def resident() -> float:
        return process.memory_info().rss / 2**20

    def watch() -> None:
        while not is_over.wait(0.2):
            seen.append(resident())

    gc.collect()
    seen, found = [resident()], {}
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    try:
        yield found
    finally:
        seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        is_over.set()
        thread.join()
        found["seconds"], found["frontend_cpu_s"] = round(seconds, 3), round(cpu_s, 3)
        found["frontend_grew_mib"] = round(max(seen) - seen[0])


class Rows:
    """Rows of this run, each written as soon as it is there."""

    def __init__(self, facts: dict[str, Any], out: Path | None, is_recorded: bool) -> None:
        self.facts, self.out, self.is_recorded = facts, out, is_recorded

    def add(self, row: dict[str, Any]) -> None:
        row = {**row, **self.facts}
        if self.is_recorded:
            append_rows("frontend", [row])
        if self.out:
            append_rows("frontend", [row], self.out)


class Plan:
    """Which turns are left and what each may cost; rows and lines of those that were taken."""

    def __init__(self, arguments: argparse.Namespace, case: dict[str, Any], rows: Rows, begin_s: float) -> None:
        self.arguments, self.case, self.rows, self.begin_s = arguments, case, rows, begin_s
        self.pace: dict[tuple[str, int], float] = {}
        self.num_failed = 0

    def turns(self, ways: Sequence[str]) -> Iterator[tuple[str, int, int, int]]:
        """Name, requests, tokens and turn, as far as the time lasts; who is first changes from turn to turn."""
        for num_tokens in sorted(self.arguments.tokens):
            for turn in range(self.arguments.turns):
                first = turn % len(ways)
                for num_requests in self.arguments.requests:
                    for name in (*ways[first:], *ways[:first]):
                        left_s = self.arguments.seconds - (time.perf_counter() - self.begin_s)
                        expected_s = self.pace[name, num_requests] * num_tokens
                        if expected_s > left_s:
                            say(f"skipped: {name}, {num_requests} x {num_tokens}: "
                                f"{expected_s:.0f} s, {left_s:.0f} s left")  # fmt: skip
                            continue
                        yield name, num_requests, num_tokens, turn

    def warmed_up(self, name: str, num_requests: int, found: dict[str, float]) -> None:
        self.pace[name, num_requests] = found["seconds"] / WARM_UP_TOKENS

    def taken(self, name: str, num_requests: int, num_tokens: int, turn: int, found: dict[str, float]) -> None:
        self.pace[name, num_requests] = found["seconds"] / num_tokens
        rate = num_requests * num_tokens / found["seconds"]
        self.rows.add({"case": {**self.case, "requests": num_requests, "tokens": num_tokens}, "impl": name,
                       "turn": turn, "metric": "frontend_throughput", "unit": "tokens/s",
                       "value": round(rate, 1), **found})  # fmt: skip
        self.num_failed += bool(found["failed"])
        cost = f"{found['frontend_cpu_s'] / found['seconds']:.0%} busy, {found['frontend_grew_mib']:+,.0f} MiB"
        failed = ", FAILED" if found["failed"] else ""
        say(f"turn {turn}, {num_requests} x {num_tokens}, {name:>12}: {rate:10,.0f} tokens/s, front end {cost}{failed}")
