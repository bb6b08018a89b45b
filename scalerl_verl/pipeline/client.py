# SPDX-License-Identifier: Apache-2.0
"""The agent loops' way to the generators: a request that hangs or whose generator dies is sent again."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any
from uuid import uuid4

import ray
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from scalerl_verl.errors import NoGeneratorError, RequestFailedError
from scalerl_verl.names import TRAINER_MODE
from scalerl_verl.pipeline.failures import as_coroutine, is_unreachable, strike_pause_s
from scalerl_verl.pipeline.settings import PipelineSettings, pipeline_settings
from scalerl_verl.pipeline.turns import find_continued, note_call

logger = logging.getLogger(__name__)
LOOKS = 8
"""How often in the time that a request has it is looked whether it waits for a slot."""
NO_GENERATOR_PAUSE_S = 5.0
"""Seconds until a request asks again for a generator when there is none."""
ABORT_TIMEOUT_S = 30.0
"""Seconds a server has to abort a request that hangs before it is left alone."""


class PipelineClient(LLMServerClient):
    """verl's client with a time-out, without the abort-and-resume of partial rollouts: requests survive updates.

    A second attempt starts from the prompt: its tokens share the one budget of the response, and its versions start
    with the weights of the moment, so the bound of its group holds as before.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unreachable: set[str] = set()
        self._aborts: set[asyncio.Task[None]] = set()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Generate one response; ``extra_fields`` gets ``reissues``, the number of failed attempts.

        Args:
            request_id: of the agent loop, for keeping the turns of one conversation on one server.
            prompt_ids: token ids.
            sampling_params: verl's sampling parameters.
            **kwargs: what verl's agent loops pass besides; images, video and audio are refused.

        Raises:
            RequestFailedError: no attempt gave a result.
            ValueError: the request carries images, video or audio.
        """
        _refuse_media(kwargs)
        settings = pipeline_settings(self.config)
        causes: list[str] = []
        num_unreachable = 0
        while len(causes) - num_unreachable < settings.max_attempts and num_unreachable <= settings.max_strikes:
            # Another id for another attempt: the balancer would send the same one to the same server.
            sticky_id = f"{request_id}-{len(causes)}" if causes else request_id
            try:
                priority = int(kwargs.get("priority", 0))
                options = {"priority": priority, "continued": find_continued(prompt_ids)}
                output = await self._attempt(sticky_id, prompt_ids, dict(sampling_params), options, settings)
            except _AttemptError as error:
                causes.append(str(error))
                logger.warning("request %s: attempt %d failed: %s", request_id, len(causes), error)
                if error.pause_s is not None:
                    num_unreachable += 1
                    await asyncio.sleep(error.pause_s)
                continue
            output.extra_fields["reissues"] = len(causes)
            note_call(prompt_ids, output)
            return output
        raise RequestFailedError(f"request {request_id} failed {len(causes)} times: {'; '.join(causes)}")

    async def _attempt(
        self,
        sticky_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        options: dict[str, Any],
        settings: PipelineSettings,
    ) -> TokenOutput:
        try:
            server_id, server = await self._await_server(
                settings.request_timeout_s, sticky_id, prompt_ids=prompt_ids, sampling_params=sampling_params
            )
        except ray.exceptions.ActorUnavailableError as error:
            raise _AttemptError("the load balancer could not be reached", strike_pause_s(1)) from error
        engine_id = uuid4().hex
        try:
            call = server.generate.remote(
                prompt_ids=prompt_ids, sampling_params=sampling_params, request_id=engine_id, **options
            )
            output = await self._answer(call, server, engine_id, settings.request_timeout_s)
        except asyncio.TimeoutError:
            await self._abort(server, engine_id)
            raise _AttemptError(f"no result from {server_id} within {settings.request_timeout_s:g} s") from None
        except ray.exceptions.RayError as error:
            if is_unreachable(error):
                pause_s = await self._note_unreachable(server_id, server, engine_id, settings.max_strikes)
                raise _AttemptError(f"{server_id} could not be reached", pause_s) from error
            if not is_dead_generator(error):
                raise
            # Nobody else should be sent there; the weight updater takes it out of its group by itself.
            await self._load_balancer.remove_servers.remote([server_id])
            raise _AttemptError(f"generator {server_id} died") from error
        finally:
            self._release_server(server_id, request_id=sticky_id)
        if server_id in self._unreachable:
            self._unreachable.discard(server_id)
            self._load_balancer.report_reached.remote(server_id)
        if output.stop_reason == "aborted":
            raise _AttemptError(f"{server_id} aborted it")
        return output

    async def _await_server(self, within_s: float, request_id: str, **extra: Any) -> tuple[str, Any]:
        """A server; while there is none the run ends, or one comes back or is launched in the place of a dead one."""
        began = time.monotonic()
        while True:
            try:
                server_id, server = await self._acquire_server(request_id, **extra)
                return server_id, server
            except ray.exceptions.RayTaskError as error:
                if not isinstance(error.cause, NoGeneratorError):
                    raise
                if time.monotonic() - began > within_s:
                    raise _AttemptError(f"no generator came back within {within_s:g} s") from error
                await asyncio.sleep(NO_GENERATOR_PAUSE_S)

    async def _note_unreachable(self, server_id: str, server: Any, engine_id: str, max_strikes: int) -> float:
        """Seconds until another attempt has a chance; the lost one is ended when its server is there again."""
        self._unreachable.add(server_id)
        task = asyncio.ensure_future(self._abort_when_reached(server, engine_id, max_strikes))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        return float(await self._load_balancer.report_unreachable.remote(server_id, max_strikes))

    async def _abort_when_reached(self, server: Any, engine_id: str, max_strikes: int) -> None:
        """Nobody waits for the request any more; an engine that never hears of that would generate it to its end."""
        for strike in range(max_strikes):
            await asyncio.sleep(strike_pause_s(strike) if strike else 0.0)
            try:
                await asyncio.wait_for(as_coroutine(server.abort_request.remote(engine_id)), ABORT_TIMEOUT_S)
                return
            except asyncio.TimeoutError:
                continue
            except ray.exceptions.RayError as error:
                if not is_unreachable(error):
                    return
        logger.warning("request %s could not be aborted: its generator was not reached again", engine_id)

    async def _answer(self, call: Any, server: Any, engine_id: str, timeout_s: float) -> TokenOutput:
        """The result of a request, which has ``timeout_s`` seconds for it from the first look that finds it in a slot.

        Raises:
            asyncio.TimeoutError: no result came.
        """
        answer = asyncio.ensure_future(as_coroutine(call))
        try:
            while not (await asyncio.wait({answer}, timeout=timeout_s / LOOKS))[0]:
                if not await self._is_queued(server, engine_id, timeout_s):
                    return await asyncio.wait_for(answer, timeout_s)
            return answer.result()
        finally:
            answer.cancel()

    async def _is_queued(self, server: Any, engine_id: str, timeout_s: float) -> bool:
        question = as_coroutine(server.is_queued.remote(engine_id, timeout_s))
        try:
            return bool(await asyncio.wait_for(question, ABORT_TIMEOUT_S))
        except (asyncio.TimeoutError, ray.exceptions.RayError):
            return False

    async def _abort(self, server: Any, engine_id: str) -> None:
        try:
            answer = await asyncio.wait_for(as_coroutine(server.abort_request.remote(engine_id)), ABORT_TIMEOUT_S)
        except (asyncio.TimeoutError, ray.exceptions.RayError) as error:
            logger.warning("request %s could not be aborted: %r", engine_id, error)
            return
        if not answer["aborted"]:
            logger.warning("request %s could not be aborted: %s", engine_id, answer.get("error", "it is still there"))


class _AttemptError(Exception):
    """An attempt that is worth another one; after ``pause_s`` seconds if its server could not be reached."""

    def __init__(self, cause: str, pause_s: float | None = None) -> None:
        super().__init__(cause)
        self.pause_s = pause_s


def is_dead_generator(error: BaseException) -> bool:
    """Whether a call failed because the server's process, or the engine behind it, is gone."""
    if isinstance(error, ray.exceptions.RayActorError):
        return not is_unreachable(error)
    # The class is vLLM's, which this process need not have imported.
    return type(getattr(error, "cause", None)).__name__ == "EngineDeadError"


def _refuse_media(given: dict[str, Any]) -> None:
    media = [key for key in ("image_data", "video_data", "audio_data") if given.get(key)]
    if media:
        raise ValueError(
            f"{', '.join(media)} in a request: vLLM's encoder cache does not know weight versions, so a pipeline run "
            f"takes text only; use another {TRAINER_MODE}"
        )
