# SPDX-License-Identifier: Apache-2.0
"""Demonstrations for the supervised phase: the format, and flaws that reinforcement learning is to cure.

`<think>` steps `</think>` and the answer between `<answer>` tags. A flawed demonstration slips, skips the work and
guesses, or doubts one step and writes it again and again. Long doubt runs into the budget of forced interruption.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from recipes.reasoning.families import FAMILIES, Entry, Hand, Line

THINK_START, THINK_END = "<think>\n", "\n</think>\n<answer>"
ANSWER_END = "</answer>"
DOUBT = "Wait, let me check that again: "


@dataclass(frozen=True)
class FlawRates:
    """How often a demonstration goes wrong; every rate is a probability in [0, 1].

    slip: of each result.
    skip_work: nothing is written out, and the answer is a guess.
    doubt: one step is doubted and written again; keep_doubting is the chance of one more time, each time.
    """

    slip: float = 0.2
    skip_work: float = 0.2
    doubt: float = 0.3
    keep_doubting: float = 0.85

    def __post_init__(self) -> None:
        for name in ("slip", "skip_work", "doubt", "keep_doubting"):
            rate = getattr(self, name)
            if not 0 <= rate <= 1:
                raise ValueError(f"FlawRates.{name}={rate} is not a probability; give a number from 0 to 1.")
        if self.keep_doubting == 1:
            raise ValueError("FlawRates.keep_doubting=1 would never stop; give a number below 1.")


PERFECT = FlawRates(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Demonstration:
    """A response in the parts that an interruption needs.

    Args:
        thinking: from the start marker to the last step.
        answer: what stands between the tags.
        answer_if_cut: the same if the thinking was cut: what had been found before the doubt.
    """

    thinking: str
    answer: str
    answer_if_cut: str

    @property
    def text(self) -> str:
        """The whole response, not interrupted."""
        return f"{self.thinking}{THINK_END}{self.answer}{ANSWER_END}"


def demonstrate(family: str, entry: Entry, rng: random.Random, flaws: FlawRates) -> Demonstration:
    """Return a written-out solution with flaws at their rates."""
    solve = FAMILIES[family].solve
    if rng.random() < flaws.skip_work:
        guess = solve(entry, Hand(rng, 1.0))[-1].result
        return Demonstration(f"{THINK_START}I think I know it.", guess, guess)
    lines = solve(entry, Hand(rng, flaws.slip))
    written = [line.text for line in lines]
    known: Line = lines[-1]
    if rng.random() < flaws.doubt:
        doubted = rng.randrange(len(lines))
        known = lines[doubted]
        again = f"\n{DOUBT}{lines[doubted].text}"
        written[doubted] += again
        while rng.random() < flaws.keep_doubting:
            written[doubted] += again
    return Demonstration(f"{THINK_START}{chr(10).join(written)}", lines[-1].result, known.result)
