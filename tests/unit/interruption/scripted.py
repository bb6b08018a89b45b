# SPDX-License-Identifier: Apache-2.0
"""A scripted engine (a stub: real ones cannot be made to stop at a chosen token) and codecs for it.

Characters are tokens, or pairs of characters are, so that a marker lies across token boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.workers.rollout.replica import TokenOutput

from scalerl_verl.interruption.budgets import Budgets, InterruptionSettings, resolve_budgets
from scalerl_verl.interruption.markers import ThinkingScript

EOS = 3
"""Ends a turn; written as "$" in scripts."""
PROMPT = [ord(letter) for letter in "1+1?"]
_PAIR = 1 << 16


def encode_chars(text: str) -> list[int]:
    return [EOS if letter == "$" else ord(letter) for letter in text]


def encode_pairs(text: str) -> list[int]:
    """Two characters a token from the first on, an odd last one by itself."""
    chars = encode_chars(text)
    pairs = [chars[i] * _PAIR + chars[i + 1] for i in range(0, len(chars) - 1, 2)]
    return pairs + (chars[-1:] if len(chars) % 2 else [])


def decode(ids: Sequence[int]) -> str:
    chars = [part for token in ids for part in (divmod(token, _PAIR) if token >= _PAIR else (token,))]
    return "".join("$" if code == EOS else chr(code) for code in chars)


def make_script(settings: InterruptionSettings, pairs: bool = False) -> ThinkingScript:
    return ThinkingScript(settings, encode_pairs if pairs else encode_chars, decode)


def make_budgets(settings: InterruptionSettings, script: ThinkingScript, total: int) -> Budgets:
    return resolve_budgets(settings, total, len(script.phrase_ids), script.grace_tokens)


@dataclass
class ScriptedEngine:
    """Continues a prefix as written down: with ``thinking``, and behind the phrase with ``answer``.

    A function of the prefix alone, as an engine is. The log-prob of a token tells its position in the response:
    ``-(position + 1) / 1000``.

    Args:
        thinking: text without interruption, "$" for the end of the turn.
        answer: text after the phrase.
        phrase_ids: by which it knows that it was interrupted.
        encode: text -> token ids.
        aborts: how many tokens each request but the following ones may yield before it is aborted.
        stops: stop strings, as the engine would look for them.
    """

    thinking: str
    answer: str
    phrase_ids: tuple[int, ...]
    encode: Any = encode_chars
    aborts: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=lambda: list(PROMPT))
    asked: list[tuple[int, int]] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        prefix = prompt_ids[len(self.prompt_ids) :]
        limit = sampling_params["max_tokens"]
        assert limit >= 1, "vLLM refuses a limit of 0"
        self.asked.append((len(prefix), limit))
        self.request_ids.append(request_id)
        rest = self._continue(prefix)
        allowed = min(limit, self.aborts.pop(0)) if self.aborts else limit
        ids: list[int] = []
        for token in rest[:allowed]:
            ids.append(token)
            if token == EOS or any(stop in decode(ids) for stop in sampling_params.get("stop", ())):
                break
        complete = len(ids) == limit or (ids and len(ids) < allowed) or (ids and ids[-1] == EOS)
        return TokenOutput(
            token_ids=ids,
            log_probs=[-(len(prefix) + i + 1) / 1000 for i in range(len(ids))]
            if sampling_params.get("logprobs")
            else None,
            stop_reason="completed" if complete else "aborted",
            num_preempted=1,
            extra_fields={
                "global_steps": len(self.asked),
                "min_global_steps": len(self.asked),
                "max_global_steps": len(self.asked),
                "num_cached_tokens": len(prompt_ids) // 4 * 4,
            },
        )

    def _continue(self, prefix: list[int]) -> list[int]:
        phrase, size = list(self.phrase_ids), len(self.phrase_ids)
        ends = [i + size for i in range(len(prefix) - size + 1) if prefix[i : i + size] == phrase]
        if ends:
            return self.encode(self.answer)[len(prefix) - ends[0] :]
        thinking = self.encode(self.thinking)
        assert prefix == thinking[: len(prefix)], f"no script for {decode(prefix)!r}"
        return thinking[len(prefix) :]
