# SPDX-License-Identifier: Apache-2.0
"""Which request each sampled token of a response comes from: several turns, tools, interruption.

An agent loop may ask the generator any number of times for one response, and knows nothing of weight versions. So the
client notes every answer, and the runs of a response are put together from these when its loop has ended.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scalerl_verl.columns import VERSIONS
from scalerl_verl.errors import StalenessError
from scalerl_verl.pipeline.versions import VersionRuns, merge_runs, oldest_version, truncate_runs


@dataclass(frozen=True)
class Call:
    """An answer of the generator.

    Args:
        prompt: token ids that were asked with.
        tokens: token ids that were sampled.
        runs: their versions.
        prefix_version: under which the generator's cache has its prefix.
        reissues: failed attempts before this answer.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    runs: VersionRuns
    prefix_version: int = -1
    reissues: int = 0


_calls: contextvars.ContextVar[list[Call] | None] = contextvars.ContextVar("scalerl_calls", default=None)


@contextlib.contextmanager
def collecting_calls() -> Iterator[list[Call]]:
    """Inside, what this task and those that it starts are answered is collected."""
    calls: list[Call] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


def note_call(prompt: Sequence[int], output: Any) -> None:
    """Add an answer (verl's TokenOutput) to the collection of `collecting_calls`; outside of one, do nothing."""
    calls, extra = _calls.get(), output.extra_fields
    if calls is not None:
        runs = [(version, count) for version, count in extra[VERSIONS]]
        calls.append(Call(list(prompt), list(output.token_ids), runs, extra["prefix_version"], int(extra["reissues"])))


def find_continued(prompt: Sequence[int]) -> tuple[int, int] | None:
    """Of the answer after which a request goes on: its `Call.prefix_version`, and tokens that were computed by then.

    None if the request begins anew. The KV of the last token that was sampled was never computed.
    """
    best: tuple[int, int] | None = None
    for call in _calls.get() or ():
        size = len(call.prompt)
        if prompt[:size] == call.prompt:
            known = size + min(_shared(call.tokens, prompt, size, len(prompt)), max(len(call.tokens) - 1, 0))
            if best is None or known > best[1]:
                best = (call.prefix_version, known)
    return best


def note_versions(outputs: Sequence[Any]) -> None:
    """Write the versions of each output's sampled tokens into its ``extra_fields``, whatever its loop has put there.

    Args:
        outputs: verl's AgentLoopOutput of one response: its ids, and which of them were sampled.

    Raises:
        StalenessError: a token that is to be trained comes from no answer of the generator.
    """
    calls = _calls.get() or []
    for output in outputs:
        runs = join_calls(output.prompt_ids, output.response_ids, output.response_mask, calls)
        output.extra_fields[VERSIONS] = [list(run) for run in runs]
        output.extra_fields["reissues"] = 0
        if runs:
            output.extra_fields["min_global_steps"] = oldest_version(runs)
            output.extra_fields["max_global_steps"] = max(version for version, _ in runs)
    outputs[-1].extra_fields["reissues"] = sum(call.reissues for call in calls)


def join_calls(
    prompt: Sequence[int], response: Sequence[int], mask: Sequence[int], calls: Sequence[Call]
) -> VersionRuns:
    """Runs of the tokens of ``response`` where ``mask`` is 1, in their order.

    A call belongs where the tokens before are those that it was asked with, and as much of it counts as stands there:
    loops cut responses. A loop that shows its model other tokens than those it returns (older turns left out, say) is
    told by the sampled tokens alone: the first call that stands there as a whole, or up to where the response is cut.

    Raises:
        StalenessError: some token is of no call.
    """
    whole, left = [*prompt, *response], list(calls)
    parts: list[VersionRuns] = []
    at = 0
    while at < len(response):
        if not mask[at]:
            at += 1
            continue
        end = next((place for place in range(at, len(response)) if not mask[place]), len(response))
        call = _find_call(left, whole, len(prompt) + at, len(prompt) + end)
        if call is None:
            num_tokens = sum(len(call.tokens) for call in calls)
            raise StalenessError(
                f"token {at} of a response is to be trained (its response_mask is 1), but is none of the {num_tokens} "
                f"that the generator sampled for it in {len(calls)} requests, so nobody knows which weights it is of: "
                "the agent loop has to return sampled tokens as they are, and to mask all others"
            )
        size = _shared(call.tokens, whole, len(prompt) + at, len(prompt) + end)
        parts.append(truncate_runs(call.runs, size))
        left = [other for other in left if other is not call]
        at += size
    return merge_runs(*parts)


def _find_call(calls: Sequence[Call], whole: Sequence[int], start: int, end: int) -> Call | None:
    sizes = {id(call): _shared(call.tokens, whole, start, end) for call in calls}
    asked = [call for call in calls if sizes[id(call)] and len(call.prompt) == start and call.prompt == whole[:start]]
    if asked:
        return max(asked, key=lambda call: sizes[id(call)])
    return next((call for call in calls if 0 < sizes[id(call)] == min(len(call.tokens), end - start)), None)


def _shared(tokens: Sequence[int], whole: Sequence[int], start: int, end: int) -> int:
    """How many of ``tokens`` stand in ``whole`` from ``start`` on, before ``end``."""
    most = min(len(tokens), end - start)
    if tokens[:most] == whole[start : start + most]:
        return most
    return next(size for size in range(most) if tokens[size] != whole[start + size])
