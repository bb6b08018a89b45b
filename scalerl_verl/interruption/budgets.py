# SPDX-License-Identifier: Apache-2.0
"""Token budgets of a response: how long it may think, what is kept for its answer, and who draws what.

All budgets count tokens of the response, over every request that it takes, whatever weights they run with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scalerl_verl.names import INTERRUPTION_SECTION
from scalerl_verl.names.keys import PAPER_ANSWER, PAPER_HIGH, PAPER_LOW, PAPER_TOTAL, defaults, wrong_fields
from scalerl_verl.names.kinds import is_text

_DEFAULT = defaults(INTERRUPTION_SECTION)


@dataclass(frozen=True)
class InterruptionSettings:
    """``algorithm.scalerl.interruption``: read by the agent loop ``forced_interruption``.

    Args:
        thinking_budget: ``[low, high]``, tokens; each response draws its own uniformly, both ends included. null: the
            paper's share of the response length, 10,000 to 12,000 of 14,336, or less if phrase and answer need room.
        answer_budget: tokens that an interrupted response may answer with. They are kept free, whatever thinking budget
            was drawn. null: the paper's share, 2,048 of 14,336.
        val_thinking_budget: ``thinking_budget`` in validation; null: as in training.
        val_answer_budget: ``answer_budget`` in validation; null: as in training.
        phrase: text that is appended where the thinking budget ends; has to contain ``end_marker``.
        start_marker: text that opens the thinking, in the prompt or in the response. null: a response thinks from its
            first token on.
        end_marker: text that closes the thinking.
        plain_text_markers: the markers are ordinary text to the tokenizer (start-up refuses that otherwise: most models
            whose vocabulary and chat template have no such marker were never trained to think).
        seed: seed of the drawn budgets.
    """

    thinking_budget: Sequence[int] | None = _DEFAULT["thinking_budget"]
    answer_budget: int | None = _DEFAULT["answer_budget"]
    val_thinking_budget: Sequence[int] | None = _DEFAULT["val_thinking_budget"]
    val_answer_budget: int | None = _DEFAULT["val_answer_budget"]
    phrase: str = _DEFAULT["phrase"]
    start_marker: str | None = _DEFAULT["start_marker"]
    end_marker: str = _DEFAULT["end_marker"]
    plain_text_markers: bool = _DEFAULT["plain_text_markers"]
    seed: int = _DEFAULT["seed"]

    def __post_init__(self) -> None:
        problems = [*wrong_fields(self, INTERRUPTION_SECTION), *self._text_problems()]
        if problems:
            raise ValueError("\n".join(problems))

    def _text_problems(self) -> Iterator[str]:
        start, end = self.start_marker, self.end_marker
        if not is_text(end):
            return  # a line of its own
        if not isinstance(self.phrase, str) or self.phrase.count(end) != 1:
            yield f"phrase={self.phrase!r} must contain end_marker={end!r} once, to close the thinking"
        elif start is not None and is_text(start):
            if start.strip() in end.strip() or end.strip() in start.strip():
                yield f"start_marker={start!r} and end_marker={end!r} must not hold one another"
            elif start.strip() in self.phrase:
                yield f"phrase={self.phrase!r} must not hold start_marker={start!r}: it opens the thinking"


@dataclass(frozen=True)
class Budgets:
    """Budgets that fit together, in tokens.

    Args:
        low: least thinking budget.
        high: greatest thinking budget.
        answer: what an interrupted response may answer with.
        grace: what a response may take beyond its budget to complete an end marker that it has begun.
        total: the whole response, injected tokens included.
    """

    low: int
    high: int
    answer: int
    grace: int
    total: int

    def draw(self, seed: int, prompt_ids: Sequence[int], session: int, step: int = 0) -> int:
        """The thinking budget of one response, uniform in [low, high].

        It depends on what the response is: prompt, number among the responses to it, training step in which the prompt
        was handed out, and seed. A request that is reissued, and a step that is repeated after a restart, draw the
        same; the next visit of the prompt draws anew.

        Args:
            seed: of the settings.
            prompt_ids: tokens of the prompt.
            session: number of the response.
            step: training step; 0 in validation, whose budgets are the same each time.
        """
        identity = f"{seed}/{step}/{session}/{','.join(map(str, prompt_ids))}"
        number = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big")
        return self.low + number % (self.high - self.low + 1)


def resolve_budgets(
    settings: InterruptionSettings, total: int, phrase_tokens: int, grace_tokens: int, validation: bool = False
) -> Budgets:
    """Fill in what the settings leave open, and make sure that everything fits into a response.

    Args:
        settings: as configured.
        total: tokens of a response at most (``data.max_response_length``).
        phrase_tokens: tokens of the phrase.
        grace_tokens: see `Budgets`.
        validation: take the budgets of validation.

    Raises:
        ValueError: they do not fit, with the numbers.
    """
    prefix = "val_" if validation else ""
    thinking, answer = settings.thinking_budget, settings.answer_budget
    if validation:
        thinking = settings.val_thinking_budget if settings.val_thinking_budget is not None else thinking
        answer = settings.val_answer_budget if settings.val_answer_budget is not None else answer
    if answer is None:
        answer = total * PAPER_ANSWER // PAPER_TOTAL
    room = total - answer - phrase_tokens - grace_tokens
    if thinking is None:
        high = min(total * PAPER_HIGH // PAPER_TOTAL, room)
        low = min(total * PAPER_LOW // PAPER_TOTAL, high)
        low = max(low, 1)
    else:
        low, high = (int(number) for number in thinking)
    if high > room or room < 1:
        parts = f"a phrase of {phrase_tokens} tokens and {answer} for the answer"
        if grace_tokens:
            parts += f" and {grace_tokens} to complete an end marker"
        raise ValueError(
            f"{prefix}thinking_budget up to {max(high, 1)}, {parts} do not fit into data.max_response_length={total}: "
            f"lower {prefix}thinking_budget or {prefix}answer_budget, shorten phrase, or raise data.max_response_length"
        )
    return Budgets(low=low, high=high, answer=int(answer), grace=grace_tokens, total=total)
