# SPDX-License-Identifier: Apache-2.0
"""verl's vLLM server with weight updates that keep every request: pause, swap, resume, versions per token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

import ray
from verl.single_controller.ray.base import RayClassWithInitArgs
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import TokenOutput

from scalerl_verl.columns import VERSIONS
from scalerl_verl.errors import RequestFailedError, WeightSyncError
from scalerl_verl.generator.server import ScaleRLHttpServer, ScaleRLReplica
from scalerl_verl.pipeline.engine_checks import require_updatable
from scalerl_verl.pipeline.relaunching import launch_again
from scalerl_verl.pipeline.versions import VersionLog, oldest_version, truncate_runs
from scalerl_verl.pipeline.vllm import METHOD, RECOMPUTE, SWAP

NO_VERSION = -1
"""Version of the weights that an engine invents before the first update."""
LIFE_SIGN_S = 1.0
"""Seconds between looks at an engine's health while an answer of it is awaited."""
MAX_CONCURRENCY = 1_000_000
"""Calls that Ray lets into a server at once; control calls wait behind requests as soon as there are more of these.

No config bounds requests: admission sends B(k + 1)n and all may land on one server, groups may ask for another n,
validation sends whole files beside them. And a limit saves nothing: it is a counter, a request that waits at it takes
35 KB of the process and one let in 57 KB, and a control call beside 7,000 or 20,000 of them takes 1 ms (Ray 2.60).
"""


def salt_of(version: int) -> str:
    """``cache_salt`` of requests that start under ``version``: prefixes are shared within one salt only."""
    return f"weights-{version}"


class _Clock:
    """How long an engine had nothing to do, and what it generated, since the last look.

    ``num_ended`` counts requests that left the engine; ``moved_at`` is when it last answered one or got its first.
    """

    def __init__(self) -> None:
        self.num_open = self.num_ended = 0
        self.num_tokens = self.tokens_lost = self.num_known = self.num_known_again = 0
        self._since = self._idle_from = self.moved_at = time.perf_counter()
        self._idle_s = 0.0

    def note_continued(self, num_known: int, num_cached: int) -> None:
        """A request asked for ``num_known`` tokens that were computed for its response before."""
        self.num_known += num_known
        self.num_known_again += max(0, num_known - num_cached)

    def begin(self) -> None:
        if self.num_open == 0:
            self.moved_at = time.perf_counter()
            self._idle_s += self.moved_at - self._idle_from
        self.num_open += 1

    def end(self) -> None:
        self.num_open -= 1
        self.num_ended += 1
        if self.num_open == 0:
            self._idle_from = time.perf_counter()

    def take(self, pause_s: float) -> dict[str, float]:
        """Idle seconds (the pause included), wall seconds, tokens of finished requests and tokens lost; starts anew."""
        now = time.perf_counter()
        # A pause of an engine without requests is idle time already.
        idle_s = self._idle_s + (now - self._idle_from if self.num_open == 0 else pause_s)
        taken = {
            "idle_s": idle_s,
            "wall_s": now - self._since,
            "generated_tokens": self.num_tokens,
            "tokens_lost": self.tokens_lost,
            "continued_tokens": self.num_known,
            "continued_recomputed_tokens": self.num_known_again,
        }
        self._since = self._idle_from = now
        self._idle_s = 0.0
        self.num_tokens = self.tokens_lost = self.num_known = self.num_known_again = 0
        return taken


class PipelineHttpServer(ScaleRLHttpServer):
    """One vLLM engine of a pipeline run.

    A weight update is `swap`, if the weights were staged, or else `pause_keep`, the loading of weights by others,
    `finish_update`. Nothing is aborted: requests stay in the engine with their tokens and, unless asked otherwise,
    their KV.
    """

    def _post_init(self, cuda_visible_devices: str) -> None:
        super()._post_init(cuda_visible_devices)
        self._log = VersionLog(NO_VERSION)
        self._inner_ids: dict[str, str] = {}
        self._to_abort: set[str] = set()
        self._on_its_way: set[str] = set()
        self._turns: dict[str, int] = {}
        self._salts: dict[str, int] = {}
        self._continued: dict[str, int] = {}
        self._gate = asyncio.Event()
        self._gate.set()
        self._num_entering = 0
        self._paused_at: float | None = None
        self._clock = _Clock()
        self._given_up = False

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        require_updatable(self.engine.vllm_config, self.config.tensor_model_parallel_size)
        # A vLLM without what an update needs shows now, not at the first update.
        await self._note_swap(NO_VERSION)

    async def _note_swap(self, version: int) -> dict[str, tuple[int, int]]:
        return dict(await self._ask_engine(METHOD, salt_of(version), self._find_continued()))

    def _find_continued(self) -> list[str]:
        return [self._inner_ids[request] for request in self._continued if request in self._inner_ids]

    async def _ask_engine(self, method: str, *args: Any) -> Any:
        return await self._while_alive(self.engine.engine_core.call_utility_async(method, *args))

    async def _while_alive(self, answer: Awaitable[Any]) -> Any:
        """Await ``answer`` of the engine. In vLLM itself the caller waits for ever when the engine dies.

        Raises:
            EngineDeadError: of vLLM; the engine died.
        """
        waiting = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait({waiting}, timeout=LIFE_SIGN_S))[0]:
                await self.check_alive()
            return waiting.result()
        finally:
            waiting.cancel()

    async def _take_in(self, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's ``add_request``, never in the middle of a weight update and salted with the version.

        Only what `generate` sent is remembered, which forgets it. Nobody says here when a request of verl's HTTP
        endpoint has ended, and nobody asks for its versions.
        """
        while not self._gate.is_set():
            await self._gate.wait()
        if self._given_up:
            raise self.engine.dead_error
        if request_id in self._to_abort:
            raise RequestFailedError(f"request {request_id} was aborted while it waited for a weight update")
        self._num_entering += 1
        is_ours = request_id in self._on_its_way
        try:
            if is_ours:
                self._log.begin(request_id)
            version = self._continued.get(request_id, self._log.version)
            if is_ours:
                self._salts[request_id] = version
            salted = {**prompt, "cache_salt": salt_of(version)}
            queue = await super()._take_in(request_id, salted, *args, **kwargs)
            # vLLM gives requests ids of its own; this is the one by which its engine knows this request.
            if is_ours:
                self._inner_ids[request_id] = queue.request_id
                self._on_its_way.discard(request_id)
            if self._given_up or request_id in self._to_abort:  # asked for while vLLM took the request in
                if is_ours:
                    self._to_abort.add(request_id)
                await self.engine.abort(queue.request_id, internal=True)
            return queue
        finally:
            self._num_entering -= 1

    async def generate(self, prompt_ids: list[int], sampling_params: dict, request_id: str, **kwargs: Any) -> Any:
        """verl's ``generate``; ``extra_fields`` also holds ``versions``, the runs of (version, tokens).

        Args:
            prompt_ids: token ids.
            sampling_params: verl's.
            request_id: unique.
            **kwargs: verl's, and of a request that goes on where another one of its response ended, ``continued``:
                that one's ``prefix_version`` as in its ``extra_fields``, and how many tokens it has computed.
        """
        continued = kwargs.pop("continued", None)
        if continued is not None:
            self._continued[request_id] = continued[0]
        self._turns[request_id] = self._clock.num_ended + self._clock.num_open
        self._clock.begin()
        self._on_its_way.add(request_id)
        try:
            output: TokenOutput = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
            # An engine may go on, and end requests, a moment before the counts of its swap are noted here.
            await self._gate.wait()
            num_tokens, noted = len(output.token_ids), self._log.num_noted(request_id)
            aborted = request_id in self._to_abort
            if aborted or sampling_params.get("stop"):
                # vLLM's front end ended it (it also looks for stop strings), a moment before its engine knew: tokens
                # that the engine sampled beyond that end were noted, but are not part of the response.
                runs = truncate_runs(self._log.end(request_id, max(num_tokens, noted)), num_tokens)
            else:
                if num_tokens < noted or output.stop_reason == "aborted":
                    self._clock.tokens_lost += max(noted, num_tokens)
                runs = self._log.end(request_id, num_tokens)
        finally:
            self._log.drop(request_id)
            self._inner_ids.pop(request_id, None)
            self._to_abort.discard(request_id)
            self._on_its_way.discard(request_id)
            self._turns.pop(request_id, None)
            self._continued.pop(request_id, None)
            prefix_version = self._salts.pop(request_id, self._log.version)
            self._clock.end()
        if continued is not None:
            self._clock.note_continued(continued[1], output.extra_fields.get("num_cached_tokens") or 0)
        self._clock.num_tokens += num_tokens
        if not aborted and output.stop_reason != "aborted":
            self._clock.moved_at = time.perf_counter()
        output.extra_fields[VERSIONS] = [list(run) for run in runs]
        output.extra_fields["prefix_version"] = prefix_version
        output.extra_fields["min_global_steps"] = oldest_version(runs) if runs else self._log.version
        output.extra_fields["max_global_steps"] = runs[-1][0] if runs else self._log.version
        return output

    async def swap(self, version: int, staged: list[bytes], recompute: bool) -> dict[str, float]:
        """Bring staged weights into use, with a pause that is inside the engine and covers only that.

        Args:
            version: of the staged weights.
            staged: for each rank of the engine the layout of its `StagingBuffer.finish`, or b"" if it is that of the
                update before.
            recompute: whether running requests compute their KV again.

        Returns:
            As `finish_update`, and ``swap_s``, ``drain_s``.
        """
        await self._close_gate()
        update = await self._ask_engine(SWAP, salt_of(version), staged, recompute, self._find_continued())
        counts = update.pop("counts")
        self._note_version(version, counts)
        self._gate.set()
        return self._summarise(update, counts, recompute)

    async def pause_keep(self) -> None:
        """Stop decoding; every request stays where it is."""
        self._paused_at = time.perf_counter()
        await self._close_gate()
        await self._while_alive(self.engine.pause_generation(mode="keep", clear_cache=False))

    async def finish_update(self, version: int, recompute: bool) -> dict[str, float]:
        """Take note of new weights and go on.

        Args:
            version: of the weights that were loaded since `pause_keep`.
            recompute: whether running requests compute their KV again.

        Returns:
            ``pause_s``, ``kept_requests``, ``recomputed_tokens`` of this update, and since the update before:
            ``idle_s`` (no request at all, or paused), ``wall_s``, ``generated_tokens``, ``tokens_lost``.

        Raises:
            WeightSyncError: vLLM would not let go of the old KV.
        """
        assert self._paused_at is not None, "finish_update without pause_keep"
        counts = await self._note_swap(version)
        self._note_version(version, counts)
        if recompute:
            await self._ask_engine(RECOMPUTE)
        await self._while_alive(self.engine.resume_generation())
        self._gate.set()
        pause_s, self._paused_at = time.perf_counter() - self._paused_at, None
        return self._summarise({"pause_s": pause_s}, counts, recompute)

    async def _close_gate(self) -> None:
        self._gate.clear()
        while self._num_entering:  # what is on its way into the engine has to arrive before it is counted
            await asyncio.sleep(0.001)

    def _note_version(self, version: int, counts: dict[str, tuple[int, int]]) -> None:
        if version > self._log.version:  # not when an update is repeated because another generator died in it
            outer_ids = {inner: outer for outer, inner in self._inner_ids.items()}
            self._log.update(version, {outer_ids[inner]: n for inner, (n, _) in counts.items() if inner in outer_ids})
            for inner, (num_sampled, num_computed) in counts.items():
                if inner in outer_ids and num_sampled == num_computed == 0 and outer_ids[inner] not in self._continued:
                    self._salts[outer_ids[inner]] = version
        self.global_steps = version

    def _summarise(self, times: dict[str, float], counts: dict[str, tuple[int, int]], recompute: bool) -> dict:
        recomputed = sum(num_computed for _, num_computed in counts.values()) if recompute else 0
        update = {**times, "kept_requests": len(counts), "recomputed_tokens": recomputed}
        return {**update, **self._clock.take(times["pause_s"])}

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = False) -> dict[str, Any]:
        """Abort one request by the id it was sent with; ``aborted`` tells whether the engine has let go of it."""
        if request_id in self._on_its_way:  # who sent it has sent another by now: it must not stay
            self._to_abort.add(request_id)
            return {"aborted": True, "request_id": request_id}
        inner_id = self._inner_ids.get(request_id)
        if inner_id is None:
            return {"aborted": False, "request_id": request_id, "error": "no such request in this engine"}
        self._to_abort.add(request_id)
        await self.engine.abort(inner_id, internal=True)
        gone = inner_id not in self.engine.output_processor.request_states
        return {"aborted": gone, "request_id": request_id}

    async def is_queued(self, request_id: str, within_s: float) -> bool:
        """Whether a request has no token yet because it waits for a slot, in an engine that goes on.

        vLLM serves requests in their order: once as many have ended as were here before this one, it is not waiting
        for its turn any more.

        Args:
            request_id: by which it was sent.
            within_s: an engine that answered nothing in the last so many seconds does not go on.
        """
        turn = self._turns.get(request_id, 0)
        if self._clock.num_ended >= turn or time.perf_counter() - self._clock.moved_at > within_s:
            return False
        if request_id in self._on_its_way:
            return True
        state = self.engine.output_processor.request_states.get(self._inner_ids.get(request_id))
        return state is not None and bool(state.is_prefilling)

    async def give_up(self) -> None:
        """End all requests here, also those to come, so that others serve them: the engine is hung."""
        self._given_up = True
        self._gate.set()
        self._to_abort.update(self._inner_ids)
        await self.engine.abort(list(self.engine.output_processor.request_states), internal=True)

    async def rejoin(self) -> None:
        """Take requests again after `give_up`, once the engine answers; the next update brings the weights.

        Raises:
            EngineDeadError: of vLLM; the engine died.
        """
        await self.check_alive()
        await self._note_swap(self._log.version)
        await self.give_up()  # also what came in between, which nobody waits for
        self._given_up = False

    async def check_alive(self) -> None:
        """As in every server; requests that wait for an update to end learn it, too."""
        try:
            await super().check_alive()
        except Exception:
            self._gate.set()
            raise

    async def set_global_steps(self, global_steps: int) -> None:
        """Do nothing: `finish_update` sets the version together with everything that depends on it."""

    async def clear_kv_cache(self) -> None:
        """Do nothing: no new request finds an old prefix (its salt differs), and running requests need their KV."""

    async def abort_all_requests(self, *_: Any, **__: Any) -> dict[str, Any]:
        raise WeightSyncError("a pipeline run aborts no request for a weight update; this call has no business here")


class PipelineReplica(ScaleRLReplica):
    """A replica of such servers, whose workers collect weights before they load them."""

    http_server_class = PipelineHttpServer

    @property
    def max_concurrency(self) -> int:
        """Calls that Ray lets into the server at once; verl's bound is that of an engine, not of what is sent."""
        return MAX_CONCURRENCY

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        """verl's rollout worker that can also stage weights."""
        from scalerl_verl.pipeline.weights import StagingWorker

        return RayClassWithInitArgs(
            cls=ray.remote(StagingWorker),
            rollout_config=self.config,
            model_config=self.model_config,
            replica_rank=self.replica_rank,
        )


class PipelineServerManager(LLMServerManager):
    """verl's manager of servers, which launches ours."""

    rollout_replica_class = PipelineReplica
    rollout_replicas: list[PipelineReplica]

    def launch_again(self, replica: PipelineReplica) -> PipelineReplica:
        """A replica in the place of a dead one, under its rank.

        It takes a minute or more and drives an event loop of its own: for a thread of its own.
        """
        fresh = launch_again(
            replica,
            lambda: self.rollout_replica_class(
                replica_rank=replica.replica_rank,
                config=self.rollout_config,
                model_config=self.model_config,
                gpus_per_node=self.rollout_config.n_gpus_per_node,
            ),
        )
        self.rollout_replicas = [fresh if other is replica else other for other in self.rollout_replicas]
        self.server_handles = [other.server_handle for other in self.rollout_replicas]
        self.server_addresses = [other.server_address for other in self.rollout_replicas]
        return fresh
