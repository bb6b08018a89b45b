# SPDX-License-Identifier: Apache-2.0
"""The agent loop ``forced_interruption``: verl's single-turn loop with a client that interrupts (AgentLoopWorker).

verl's loop builds the prompt, asks its client once and returns what it got. Ours hands it a client that may ask the
engine several times and passes the whole response back as if it were one answer. Whatever verl's own client does below
that, such as resuming a request after a weight update, goes on as before: each request has its own limit, so one
budget covers all attempts.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.workers.rollout.replica import TokenOutput

from scalerl_verl.engine_context import engine_context
from scalerl_verl.errors import PatchError, ScaleRLConfigError
from scalerl_verl.interruption.budgets import Budgets, InterruptionSettings, resolve_budgets
from scalerl_verl.interruption.markers import ThinkingScript
from scalerl_verl.interruption.response import RECORD_KEY, InterruptedResponse
from scalerl_verl.interruption.settings import asks_for_interruption, make_script, read_settings
from scalerl_verl.names import AGENT_LOOP, AGENT_LOOP_MANAGER, INTERRUPTION_LOOP, INTERRUPTION_SECTION, select
from scalerl_verl.upstream.registry import require_checked_run

_LIMIT_KEYS = ("max_tokens", "max_new_tokens")
_ABORTED = ("aborted", "abort")
_LENGTH = "length"


@dataclass(frozen=True)
class ResponseContext:
    """What verl's worker knows of a response and does not tell its loop.

    Args:
        validation: it belongs to a validation.
        step: training step in which its prompt was handed out; 0 in validation.
        stop_ids: token ids that end a turn, besides the tokenizer's.
        max_model_len: tokens of prompt and response that the engine holds; None if unknown.
    """

    validation: bool
    step: int
    stop_ids: frozenset[int]
    max_model_len: int | None = None


_context: contextvars.ContextVar[ResponseContext | None] = contextvars.ContextVar("scalerl_response", default=None)


def current_context() -> ResponseContext | None:
    """What is known of the response under way in this task, if its worker is one of a run of ours."""
    return _context.get()


@contextlib.contextmanager
def response_context(worker: Any, trajectory: Mapping[str, Any]) -> Iterator[None]:
    """Tell the loop about the response that ``worker`` is about to run (each runs in an asyncio task of its own)."""
    ends = getattr(getattr(worker.model_config, "generation_config", None), "eos_token_id", None)
    validation = bool(trajectory["validate"])
    step = 0 if validation else int(trajectory["step"])
    room = engine_context(getattr(worker, "config", None), getattr(worker.model_config, "hf_config", None))
    found = ResponseContext(validation, step, frozenset(_as_ids(ends)), room)
    token = _context.set(found)
    try:
        yield
    finally:
        _context.reset(token)


def _as_ids(value: Any) -> list[int]:
    return [] if value is None else [int(value)] if isinstance(value, int) else [int(item) for item in value]


_scripts: dict[tuple[int, InterruptionSettings], tuple[Any, ThinkingScript]] = {}


def script_of(tokenizer: Any, settings: InterruptionSettings) -> ThinkingScript:
    """The script of a tokenizer, built once: verl makes a loop object for every response."""
    key = (id(tokenizer), settings)
    if key not in _scripts:
        # The tokenizer is kept, so that its id is not given to another one.
        _scripts[key] = (tokenizer, make_script(tokenizer, settings))
    return _scripts[key][1]


@register(INTERRUPTION_LOOP)
class ForcedInterruptionLoop(SingleTurnAgentLoop):
    """Single-turn chat completion whose thinking ends at its budget."""

    server_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = read_settings(select(self.config, INTERRUPTION_SECTION))

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        """Generate one response; called once on each object.

        Args:
            sampling_params: verl's, for each request.
            priority: passed on to the engine.
            kwargs: the columns of the prompt, and ``session_id``: number among the responses to it.

        Returns:
            verl's output; the phrase has mask 0, and ``extra_fields["scalerl_length"]`` holds the response's record.

        Raises:
            PatchError: the start-up check has not passed in this run, or the worker is not ours.
            ScaleRLConfigError: the prompt names this loop, and the run has another by default.
        """
        require_checked_run(f"default_agent_loop={INTERRUPTION_LOOP}")
        if not asks_for_interruption(self.config):
            # Markers and budgets were not checked at start, and lengths not counted, for another default.
            raise ScaleRLConfigError(
                [
                    f"a prompt has agent_name={INTERRUPTION_LOOP}, but the default is another loop: set "
                    f"{AGENT_LOOP}={INTERRUPTION_LOOP}, and name the other in the data"
                ]
            )
        context = current_context()
        if context is None:
            raise PatchError(
                f"{INTERRUPTION_LOOP} runs outside the AgentLoopWorker of our manager ({AGENT_LOOP_MANAGER} makes its "
                "own workers): use another agent loop there"
            )
        script = script_of(self.tokenizer, self._settings)
        limits = [int(sampling_params[key]) for key in _LIMIT_KEYS if key in sampling_params]
        total = min([self.response_length, *limits])
        client = InterruptingClient(
            self.server_manager,
            script,
            resolve_budgets(
                self._settings, total, len(script.phrase_ids), script.grace_tokens, validation=context.validation
            ),
            seed=self._settings.seed,
            session=int(kwargs.get("session_id", 0)),
            step=context.step,
            stop_ids=self._stop_ids(sampling_params, context),
            decode=script.decode,
            max_model_len=context.max_model_len,
        )
        self.server_manager = client
        output = await super().run(sampling_params, priority=priority, **kwargs)
        assert client.response is not None, "verl's single-turn loop did not ask its client"
        mask = client.response.mask
        if len(output.response_mask) != len(mask) or output.response_ids != client.response.token_ids:
            raise PatchError(
                f"verl's loop returned {len(output.response_mask)} tokens for a response of {len(mask)}: it no longer "
                "passes on what its client returned, so the phrase cannot be masked"
            )
        output.response_mask = mask
        return output

    def _stop_ids(self, sampling_params: Mapping[str, Any], context: ResponseContext) -> frozenset[int]:
        """Token ids at which the engine ends a response."""
        given = frozenset(_as_ids(sampling_params.get("stop_token_ids")))
        if sampling_params.get("ignore_eos", self.rollout_config.get("ignore_eos", False)):
            return given
        return given | context.stop_ids | frozenset(_as_ids(self.tokenizer.eos_token_id))


class InterruptingClient:
    """Takes the place of verl's client for one response: several requests, one answer.

    Args:
        client: verl's LLMServerClient, whichever the trainer mode uses.
        script: markers and phrase.
        budgets: of this response.
        seed: of the draw of its thinking budget.
        session: number of the response among those to its prompt.
        step: training step in which the prompt was handed out.
        stop_ids: token ids at which the engine ends a response.
        decode: token ids -> text, to find stop strings.
        max_model_len: tokens of prompt and response that the engine holds; None if unknown. verl's server cuts a limit
            that does not fit into them, and refuses a prompt that leaves no room.
    """

    def __init__(
        self,
        client: Any,
        script: ThinkingScript,
        budgets: Budgets,
        *,
        seed: int,
        session: int,
        step: int,
        stop_ids: Collection[int],
        decode: Any,
        max_model_len: int | None = None,
    ) -> None:
        self._client, self._script, self._budgets = client, script, budgets
        self._seed, self._session, self._step = seed, session, step
        self._stop_ids, self._decode, self._max_model_len = stop_ids, decode, max_model_len
        self.response: InterruptedResponse | None = None

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Generate the whole response.

        Args:
            request_id: the same for all requests: verl sends them to the server whose cache holds the prefix.
            prompt_ids: of the prompt.
            sampling_params: for each request; limits are ours.
            kwargs: passed on.

        Returns:
            All tokens with their log-probs, those of the phrase 0.
        """
        prompt_ids = list(prompt_ids)
        budget = self._budgets.draw(self._seed, prompt_ids, self._session, self._step)
        response = InterruptedResponse(self._script, self._budgets, budget, self._script.thinks_from_start(prompt_ids))
        self.response = response
        params = {key: value for key, value in sampling_params.items() if key not in _LIMIT_KEYS}
        outputs: list[TokenOutput] = []
        continued = cached = 0
        while (limit := response.next_limit()) is not None:
            prefix = prompt_ids + response.token_ids
            room = limit if self._max_model_len is None else self._max_model_len - len(prefix)
            if room < 1 and outputs:
                response.clamp()
                break
            output = await self._client.generate(
                request_id, prompt_ids=prefix, sampling_params={**params, "max_tokens": limit}, **kwargs
            )
            if outputs:
                continued += len(prefix)
                cached += output.extra_fields.get("num_cached_tokens") or 0
            outputs.append(output)
            sampled = [] if response.phrase_span else response.token_ids
            size = self._find_stop_across(sampled, output.token_ids, params)
            ids = output.token_ids[:size]
            stopped = size is not None or output.stop_reason in _ABORTED or self._shows_stop(ids, params)
            # An aborted request may hold nothing at all.
            log_probs = (output.log_probs or [])[:size] if params.get("logprobs") else None
            is_short = len(ids) < limit
            response.add(ids, log_probs, stopped or is_short)
            if is_short and not stopped and (len(ids) >= room or output.stop_reason == _LENGTH):
                response.clamp()
        return _merge(outputs, response, params, response.record(continued, cached).as_dict())

    def _shows_stop(self, token_ids: Sequence[int], params: Mapping[str, Any]) -> bool:
        """Whether the tokens say why the engine ended: verl reports the same reason for a stop and for a limit."""
        if not token_ids:
            return False
        if token_ids[-1] in self._stop_ids:
            return True
        stops = _stop_strings(params)
        if not stops:
            return False
        tail = self._decode(token_ids[-max(map(len, stops)) - 1 :])
        return any(stop in tail for stop in stops)

    def _find_stop_across(
        self, sampled: Sequence[int], token_ids: Sequence[int], params: Mapping[str, Any]
    ) -> int | None:
        """Tokens of ``token_ids`` up to a stop string that began in ``sampled``; None if there is none.

        The engine looks for stop strings in what it sampled for one request, and ``sampled`` came with another one.
        """
        stops = _stop_strings(params)
        longest = max(map(len, stops), default=0)
        if longest < 2 or not sampled:
            return None
        before = list(sampled[1 - longest :])
        for size in range(1, min(longest, len(token_ids) + 1)):
            text = self._decode(before + list(token_ids[:size]))
            if any(stop in text for stop in stops):
                return size
        return None


def _stop_strings(params: Mapping[str, Any]) -> tuple[str, ...]:
    stops = params.get("stop") or ()
    return (stops,) if isinstance(stops, str) else tuple(stops)


def _merge(
    outputs: Sequence[TokenOutput], response: InterruptedResponse, params: Mapping[str, Any], record: dict[str, Any]
) -> TokenOutput:
    """One TokenOutput of all requests: fields of the first, steps from first to last, preemptions added up."""
    extra = dict(outputs[0].extra_fields)
    extra["max_global_steps"] = outputs[-1].extra_fields.get("max_global_steps")
    if "global_steps" in outputs[-1].extra_fields:
        extra["global_steps"] = outputs[-1].extra_fields["global_steps"]
    extra[RECORD_KEY] = record
    preempted = [output.num_preempted for output in outputs if output.num_preempted is not None]
    return TokenOutput(
        token_ids=response.token_ids,
        log_probs=response.log_probs if params.get("logprobs") else None,
        stop_reason=outputs[-1].stop_reason,
        num_preempted=sum(preempted) if preempted else None,
        extra_fields=extra,
    )
