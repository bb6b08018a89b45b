# SPDX-License-Identifier: Apache-2.0
"""Tokens a second that a generator returns: asked verl's way, with the fast front end, and the engine driven directly.

python -m benchmarks.frontend.bench                                       0.28B parameters, on a CUDA device
python -m benchmarks.frontend.bench --size 2B --requests 256 --tokens 8192
python -m benchmarks.frontend.bench --size tiny                           in small, on a CPU too

One process holds verl's server and vLLM's front end, as a generator's does; vLLM's engine is a process of its own. The
three ways take turns on one engine. Each turn is a row, written as soon as it is measured; no turn begins that is not
expected to end within ``--seconds``. First a request is answered in all three ways, and the answers are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.frontend.engine import SIZES, make_config, make_model, start_server
from benchmarks.rows import append_rows, describe_gpu, run_facts

VERL, OURS, ENGINE = "verl", "scalerl_verl", "engine alone"
WAYS = (VERL, OURS, ENGINE)
WARM_UP_TOKENS = 48
Answer = tuple[list[int], list[float]]


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


class Bench:
    """A started server and what is asked of it."""

    def __init__(self, server: Any, prompt_length: int, vocab: int) -> None:
        self.server, self.prompt_length, self.vocab, self.count = server, prompt_length, vocab, 0

    def prompt(self, number: int) -> list[int]:
        return [300 + (7919 * number + 13 * at) % (self.vocab - 300) for at in range(self.prompt_length)]

    async def ask_server(self, number: int, num_tokens: int, **params: Any) -> Answer:
        """As verl's agent loops ask."""
        self.count += 1
        given = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, **params}
        given |= {"max_tokens": num_tokens, "ignore_eos": True}
        output = await self.server.generate(self.prompt(number), given, f"request-{self.count}")
        return output.token_ids, output.log_probs

    async def ask_engine(self, number: int, num_tokens: int, **params: Any) -> Answer:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.count += 1
        given = {"temperature": 1.0, "logprobs": 0, "detokenize": False, **params}
        asked = SamplingParams(
            max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY, **given
        )
        prompt = {"prompt_token_ids": self.prompt(number)}
        async for output in self.server.engine.generate(prompt, asked, f"request-{self.count}"):
            (answer,) = output.outputs
        tokens = list(answer.token_ids)
        return tokens, [entry[token].logprob for token, entry in zip(tokens, answer.logprobs, strict=True)]

    def way(self, name: str) -> Callable[..., Awaitable[Answer]]:
        self.server._is_fast = name == OURS
        return self.ask_engine if name == ENGINE else self.ask_server

    async def turn(self, name: str, num_requests: int, num_tokens: int) -> dict[str, float]:
        """Seconds, those that the front end's process computed, and whether every answer has its length."""
        ask = self.way(name)
        await self.server.engine.reset_prefix_cache()
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        answers = await asyncio.gather(*(ask(number, num_tokens) for number in range(num_requests)))
        seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        complete = all(len(tokens) == len(log_probs) == num_tokens for tokens, log_probs in answers)
        return {"seconds": round(seconds, 3), "frontend_cpu_s": round(cpu_s, 3), "failed": not complete}

    async def compare(self) -> str | None:
        """What differs between the three ways on a request with a seed, one at a time; None if nothing does."""
        answers = {}
        for name in WAYS:
            await self.server.engine.reset_prefix_cache()
            answers[name] = await self.way(name)(0, 32, seed=1)
        tokens, log_probs = answers[VERL]
        for name in (OURS, ENGINE):
            if answers[name][0] != tokens:
                return f"{name}: other tokens than {VERL}"
            worst = max(abs(a - b) for a, b in zip(answers[name][1], log_probs, strict=True))
            if worst > 1e-3:
                return f"{name}: log-probs differ by {worst:.2g} from those of {VERL}"
        return None


class Rows:
    """Rows of this run, each written as soon as it is there."""

    def __init__(self, facts: dict[str, Any], out: str | None, is_recorded: bool) -> None:
        self.facts, self.out, self.is_recorded = facts, out, is_recorded

    def add(self, row: dict[str, Any]) -> None:
        row = {**row, **self.facts}
        if self.is_recorded:
            append_rows("frontend", [row])
        if self.out:
            with open(self.out, "a", encoding="utf-8") as stream:
                stream.write(json.dumps({"bench": "frontend", **row}, sort_keys=True) + "\n")


async def measure(bench: Bench, arguments: argparse.Namespace, case: dict[str, Any], rows: Rows, begin_s: float) -> int:
    """All turns of all cases, as far as the time lasts; the number of rows that failed."""
    pace = {}
    for _ in range(2):  # the first time compiles what is left to compile
        for name in WAYS:
            for num_requests in arguments.requests:
                found = await bench.turn(name, num_requests, WARM_UP_TOKENS)
                pace[name, num_requests] = found["seconds"] / WARM_UP_TOKENS
    say(f"warmed up after {time.perf_counter() - begin_s:.0f} s")
    num_failed = 0
    for num_tokens in sorted(arguments.tokens):
        for turn in range(arguments.turns):
            for num_requests in arguments.requests:
                for name in (*WAYS[turn % 3 :], *WAYS[: turn % 3]):
                    left_s = arguments.seconds - (time.perf_counter() - begin_s)
                    expected_s = pace[name, num_requests] * num_tokens
                    if expected_s > left_s:
                        say(f"skipped: {name}, {num_requests} x {num_tokens}: {expected_s:.0f} s, {left_s:.0f} s left")
                        continue
                    found = await bench.turn(name, num_requests, num_tokens)
                    pace[name, num_requests] = found["seconds"] / num_tokens
                    rate = num_requests * num_tokens / found["seconds"]
                    rows.add({"case": {**case, "requests": num_requests, "tokens": num_tokens}, "impl": name,
                              "turn": turn, "metric": "frontend_throughput", "unit": "tokens/s",
                              "value": round(rate, 1), **found})  # fmt: skip
                    num_failed += bool(found["failed"])
                    busy = found["frontend_cpu_s"] / found["seconds"]
                    say(f"turn {turn}, {num_requests} x {num_tokens}, {name:>12}: {rate:10,.0f} tokens/s, "
                        f"front end busy {busy:.0%}{', FAILED' if found['failed'] else ''}")  # fmt: skip
    return num_failed


async def run(arguments: argparse.Namespace, folder: Path, begin_s: float) -> int:
    size, dtype = SIZES[arguments.size], "bfloat16" if torch.cuda.is_available() else "float32"
    longest = max(arguments.tokens)
    make_model(folder, size, arguments.prompt + longest, dtype)
    server = await start_server(make_config(folder, arguments.prompt, longest, arguments.requests, arguments.overrides))
    say(f"the server of {size.num_params / 1e6:,.1f}M parameters stands after {time.perf_counter() - begin_s:.0f} s")
    try:
        bench = Bench(server, arguments.prompt, size.vocab)
        difference = await bench.compare()
        if difference is not None:
            say(f"FAILED: {difference}")
            return 1
        say("one request in three ways: the same tokens and log-probs")
        facts = {**run_facts(uuid.uuid4().hex[:12]), **(describe_gpu() if torch.cuda.is_available() else {})}
        case = {"size": arguments.size, "params": size.num_params, "prompt": arguments.prompt, "dtype": dtype}
        rows = Rows(facts, arguments.out, not arguments.dry_run)
        return int(await measure(bench, arguments, case, rows, begin_s) > 0)
    finally:
        server.engine.shutdown()


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="0.28B")
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 768], help="sequences at once")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024], help="of each response")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=540, help="of the whole command")
    parser.add_argument("--out", help="file to which rows are appended, too")
    parser.add_argument("--overrides", nargs="*", default=[], help="of verl's config")
    parser.add_argument("--dry-run", action="store_true", help="record nothing in benchmarks/results")
    return parser.parse_args()


def main() -> int:
    begin_s = time.perf_counter()
    arguments = read_arguments()
    if not torch.cuda.is_available():
        os.environ.setdefault("VERL_PLATFORM", "cpu")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ["SCALERL_VERL_ACTIVE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(run(arguments, Path(folder), begin_s))


if __name__ == "__main__":
    sys.exit(main())
