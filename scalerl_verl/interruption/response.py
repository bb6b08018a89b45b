# SPDX-License-Identifier: Apache-2.0
"""One response under forced interruption: what to ask the engine for next, until it is complete.

The engine is only ever asked to continue a sequence of tokens, up to a limit. Where the thinking budget ends in the
middle of the thinking, the phrase is appended and the engine asked to go on from there: tokens of the phrase are never
sampled, so they have mask 0 and log-prob 0 and count in no statistic. Sampled tokens keep the log-probs that they were
sampled with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from scalerl_verl.interruption.budgets import Budgets
from scalerl_verl.interruption.markers import ThinkingScript

RECORD_KEY = "scalerl_length"
"""Where a response's record stands in what an agent loop hands on (``extra_fields``)."""
NATURAL, INTERRUPTED, UNCLOSED, NO_THINKING = "natural", "interrupted", "unclosed", "no_thinking"


@dataclass(frozen=True)
class LengthRecord:
    """What became of one response.

    Args:
        outcome: ``natural``: it closed its thinking itself; ``interrupted``; ``unclosed``: it ended inside its
            thinking; ``no_thinking``: it opened none.
        truncated: it ran out of tokens before it ended.
        clamped: the engine had no room for the budget that it ran out of.
        thinking_tokens: sampled tokens up to the end marker, or all before the phrase.
        answer_tokens: sampled tokens after that.
        injected_tokens: tokens of the phrase.
        thinking_budget: what it drew.
        continued_tokens: prompt tokens of all requests but the first.
        cached_tokens: how many of these the engine still had in its cache.
    """

    outcome: str
    truncated: bool
    thinking_tokens: int
    answer_tokens: int
    injected_tokens: int
    thinking_budget: int
    continued_tokens: int = 0
    cached_tokens: int = 0
    clamped: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class InterruptedResponse:
    """The state of one response.

    Args:
        script: markers and phrase.
        budgets: what it may use.
        thinking_budget: what it drew.
        thinks: see `ThinkingScript.thinks_from_start`.

    Attributes:
        token_ids: the response so far, phrase included.
        log_probs: of ``token_ids``, 0 for the phrase.
        phrase_span: positions of the phrase, ``[first, last + 1]``; None if there is none.
    """

    script: ThinkingScript
    budgets: Budgets
    thinking_budget: int
    thinks: bool | None
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    phrase_span: tuple[int, int] | None = None
    _answering: bool = False
    _done: bool = False
    _truncated: bool = False
    _looked_late: bool = False
    _clamped: bool = False

    def __post_init__(self) -> None:
        self._grace_left = self.budgets.grace
        self._limit = self.thinking_budget
        if self.thinks is False:
            self._answer(self._left())

    @property
    def mask(self) -> list[int]:
        """1 for sampled tokens, 0 for the phrase."""
        first, last = self.phrase_span or (0, 0)
        return [0 if first <= position < last else 1 for position in range(len(self.token_ids))]

    def next_limit(self) -> int | None:
        """Tokens to ask the engine for, to continue prompt and ``token_ids``; None: the response is complete."""
        return None if self._done else self._limit

    def clamp(self) -> None:
        """End it here: the engine has no room for another token."""
        self._clamped = True
        self._end_truncated()

    def add(self, token_ids: Sequence[int], log_probs: Sequence[float] | None, stopped: bool) -> None:
        """Take what the engine sampled.

        Args:
            token_ids: at most `next_limit` tokens.
            log_probs: of these tokens; None if they are not recorded.
            stopped: the engine ended by itself (end of turn, stop string) or gave the request up.

        Raises:
            ValueError: more tokens than asked for, another number of log-probs, or too few tokens without a stop.
        """
        if self._done or len(token_ids) > self._limit or (len(token_ids) < self._limit and not stopped):
            raise ValueError(f"{len(token_ids)} tokens (stopped={stopped}) do not answer a request for {self._limit}")
        if log_probs is not None and len(log_probs) != len(token_ids):
            raise ValueError(f"{len(log_probs)} log-probs came with {len(token_ids)} tokens")
        self.token_ids.extend(token_ids)
        self.log_probs.extend(log_probs if log_probs is not None else [0.0] * len(token_ids))
        if stopped:
            self._done = True
        elif self._answering:
            self._end_truncated()
        else:
            self._leave_thinking()

    def record(self, continued_tokens: int = 0, cached_tokens: int = 0) -> LengthRecord:
        """What became of it."""
        if self.phrase_span is not None:
            thinking, injected = self.phrase_span[0], self.phrase_span[1] - self.phrase_span[0]
            outcome = INTERRUPTED
        else:
            opened = self.thinks if self.thinks is not None else self.script.has_opened(self.token_ids)
            closed = opened and self.script.has_closed(self.token_ids)
            outcome = NATURAL if closed else UNCLOSED if opened else NO_THINKING
            thinking = self.script.count_thinking(self.token_ids) if closed or opened else 0
            injected = 0
        return LengthRecord(
            outcome=outcome,
            truncated=self._truncated,
            thinking_tokens=thinking,
            answer_tokens=len(self.token_ids) - injected - thinking,
            injected_tokens=injected,
            thinking_budget=self.thinking_budget,
            continued_tokens=continued_tokens,
            cached_tokens=cached_tokens,
            clamped=self._clamped,
        )

    def _left(self) -> int:
        return self.budgets.total - len(self.token_ids)

    def _answer(self, limit: int) -> None:
        self._answering, self._limit = True, limit
        if limit < 1:
            self._end_truncated()

    def _end_truncated(self) -> None:
        self._done = self._truncated = True

    def _leave_thinking(self) -> None:
        """The budget is used up: let it answer, let it complete its own end marker, or interrupt it."""
        ids, script = self.token_ids, self.script
        if script.has_closed(ids):
            self._answer(self._left())
            return
        if not (self.thinks or script.has_opened(ids)):
            # It may still open it: looked at once more where phrase and answer would just fit.
            late = self._left() - self.budgets.answer - len(script.phrase_ids) - self._grace_left
            if self._looked_late or late < 1:
                self._answer(self._left())
            else:
                self._looked_late, self._limit = True, late
            return
        missing = min(script.missing_of_marker(ids), self._grace_left)
        if missing:
            self._grace_left -= missing
            self._limit = missing
            return
        phrase = script.phrase_after(ids)
        self.phrase_span = (len(ids), len(ids) + len(phrase))
        ids.extend(phrase)
        self.log_probs.extend([0.0] * len(phrase))
        self._answer(min(self.budgets.answer, self._left()))
