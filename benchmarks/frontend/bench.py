# SPDX-License-Identifier: Apache-2.0
"""Tokens a second that a generator returns: asked verl's way, with the fast front end, the engine driven directly, and
vLLM's `LLM.generate`.

python -m benchmarks.frontend.bench                                       0.28B parameters, on a CUDA device
python -m benchmarks.frontend.bench --size 2B --requests 256 --tokens 8192
python -m benchmarks.frontend.bench --size tiny                           in small, on a CPU too

One process holds verl's server and vLLM's front end, as a generator's does; vLLM's engine is a process of its own.
Three ways take turns on one engine; `LLM.generate` comes last, on an engine of its own with the same settings. Each
turn is a row, written as soon as it is measured; no turn begins that is not expected to end within ``--seconds``.
First a request is answered in the three ways, and the answers are compared.
"""

from __future__ import annotations

import argparse
import asyncio
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
from benchmarks.frontend.library import make_llm, take_turn
from benchmarks.frontend.turns import (
    ENGINE,
    LIBRARY,
    OURS,
    SERVED,
    VERL,
    WARM_UP_TOKENS,
    WAYS,
    Plan,
    Rows,
    measured,
    say,
)
from benchmarks.rows import describe_gpu, run_facts

Answer = tuple[list[int], list[float]]


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
        """What the front end's process paid (`measured`), and whether an answer lacks tokens."""
        ask = self.way(name)
        await self.server.engine.reset_prefix_cache()
        with measured() as found:
            answers = await asyncio.gather(*(ask(number, num_tokens) for number in range(num_requests)))
        complete = all(len(tokens) == len(log_probs) == num_tokens for tokens, log_probs in answers)
        return {**found, "failed": not complete}

    async def compare(self) -> str | None:
        """What differs between the three ways on a request with a seed, one at a time; None if nothing does."""
        answers = {}
        for name in SERVED:
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


async def measure_served(bench: Bench, plan: Plan) -> None:
    ways = [name for name in SERVED if name in plan.arguments.ways]
    for _ in range(2):  # the first time compiles what is left to compile
        for name in ways:
            for num_requests in plan.arguments.requests:
                plan.warmed_up(name, num_requests, await bench.turn(name, num_requests, WARM_UP_TOKENS))
    say(f"warmed up after {time.perf_counter() - plan.begin_s:.0f} s")
    for name, num_requests, num_tokens, turn in plan.turns(ways) if ways else ():
        plan.taken(name, num_requests, num_tokens, turn, await bench.turn(name, num_requests, num_tokens))


def measure_library(bench: Bench, plan: Plan) -> None:
    """The server's engine has ended: its memory is free."""
    llm = make_llm(bench.server.engine.vllm_config)

    def take(num_requests: int, num_tokens: int) -> dict[str, float]:
        return take_turn(llm, [bench.prompt(number) for number in range(num_requests)], num_tokens)

    for _ in range(2):
        for num_requests in plan.arguments.requests:
            plan.warmed_up(LIBRARY, num_requests, take(num_requests, WARM_UP_TOKENS))
    for name, num_requests, num_tokens, turn in plan.turns([LIBRARY]):
        plan.taken(name, num_requests, num_tokens, turn, take(num_requests, num_tokens))


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
        plan = Plan(arguments, case, Rows(facts, arguments.out, not arguments.dry_run), begin_s)
        await measure_served(bench, plan)
    finally:
        server.engine.shutdown()
    if LIBRARY in arguments.ways:
        measure_library(bench, plan)
    return int(plan.num_failed > 0)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="0.28B")
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 768], help="sequences at once")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024], help="of each response")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=540, help="of the whole command")
    parser.add_argument("--out", type=Path, help="file to which rows are appended, too")
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
