# SPDX-License-Identifier: Apache-2.0
"""The task families: settings of reasoning-gym's generators, and written-out solutions of their problems.

A solution is a list of lines, each with its result; the last result is the answer. A solver writes with a `Hand`, which
may slip: the lines behind a slip build on it, as they do where a person slips.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Entry = Mapping[str, Any]
"""A problem as reasoning-gym makes it: question, answer, metadata."""


@dataclass(frozen=True)
class Line:
    """A line of a solution and what it comes to."""

    text: str
    result: str


class Hand:
    """Writes results down, and slips at a rate.

    Args:
        rng: of the slips.
        slip_rate: of a result.
    """

    def __init__(self, rng: random.Random, slip_rate: float) -> None:
        self._rng, self._slip_rate = rng, slip_rate

    def number(self, value: int) -> int:
        """``value``, or one that is off by one or by a carry."""
        return value + self._rng.choice((-10, -1, 1, 10)) if self._slips() else value

    def words(self, values: list[str]) -> list[str]:
        """``values``, or the same with two neighbours swapped or one word left out."""
        if not self._slips() or len(values) < 2:
            return values
        index = self._rng.randrange(len(values) - 1)
        if self._rng.random() < 0.5:
            return [*values[:index], *values[index + 1 :]]
        return [*values[:index], values[index + 1], values[index], *values[index + 2 :]]

    def _slips(self) -> bool:
        return self._rng.random() < self._slip_rate


def solve_chain_sum(entry: Entry, hand: Hand) -> list[Line]:
    """Running totals: `57 + 87 = 144`, `144 + 70 = 214`."""
    first, *rest = entry["metadata"]["expression"].split()
    total, lines = int(first), []
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        value = hand.number(total + int(number) if sign == "+" else total - int(number))
        lines.append(Line(f"{total} {sign} {number} = {value}", str(value)))
        total = value
    return lines


def solve_leg_counting(entry: Entry, hand: Hand) -> list[Line]:
    """Legs of each kind, then running totals: `3 dogs: 3 * 4 = 12`, `12 + 16 = 28`."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    lines, legs = [], []
    for animal, count in entry["metadata"]["animals"].items():
        value = hand.number(count * ANIMALS[animal])
        lines.append(Line(f"{count} {animal}{'s' if count > 1 else ''}: {count} * {ANIMALS[animal]} = {value}", ""))
        legs.append(value)
    total = legs[0]
    for number in legs[1:]:
        value = hand.number(total + number)
        lines.append(Line(f"{total} + {number} = {value}", str(value)))
        total = value
    return [Line(line.text, line.result or str(legs[0])) for line in lines]


def solve_simple_equations(entry: Entry, hand: Hand) -> list[Line]:
    """The variable's term alone, then the variable: `20*h = 1485 - 65 = 1420`, `h = 1420 / 20 = 71`."""
    variable = entry["metadata"]["variable"]
    left, right = entry["metadata"]["equation"].split(" = ")
    factor, constant = 0, 0
    for term in re.findall(r"-?[^+-]+", left.replace(" ", "")):
        number, found, _ = term.partition(variable)
        if found:
            factor = int({"": "1", "-": "-1"}.get(number.rstrip("*"), number.rstrip("*")))
        else:
            constant += int(number)
    value, lines = int(right), []
    name = f"{factor}*{variable}" if factor not in (1, -1) else f"{'-' * (factor < 0)}{variable}"
    if constant:
        moved = hand.number(value - constant)
        sign = "-" if constant > 0 else "+"
        lines.append(Line(f"{name} = {value} {sign} {abs(constant)} = {moved}", str(moved)))
        value = moved
    if factor != 1:
        solution = hand.number(round(value / factor))
        lines.append(Line(f"{variable} = {value} / {factor} = {solution}", str(solution)))
    return lines or [Line(f"{name} = {value}", str(value))]


def solve_word_sequence_reversal(entry: Entry, hand: Hand) -> list[Line]:
    """The words with their numbers, then from the last number down: `1 free, 2 may`, `2 may, 1 free`."""
    words = hand.words(list(entry["metadata"]["words"]))
    numbered = [f"{number} {word}" for number, word in enumerate(words, start=1)]
    backward = hand.words(numbered[::-1])
    answer = ", ".join(text.split(" ", 1)[1] for text in backward)
    return [Line(", ".join(numbered), ", ".join(words)), Line(", ".join(backward), answer)]


@dataclass(frozen=True)
class Family:
    """A generator of reasoning-gym with its settings, and who solves its problems."""

    solve: Callable[[Entry, Hand], list[Line]]
    settings: Mapping[str, Any] = field(default_factory=dict)


FAMILIES = {
    "chain_sum": Family(solve_chain_sum, {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 2}),
    "leg_counting": Family(solve_leg_counting, {"min_animals": 2, "max_animals": 3, "max_instances": 9}),
    "simple_equations": Family(
        solve_simple_equations,
        {"min_terms": 2, "max_terms": 3, "max_value": 12, "operators_weights": [0.5, 0.5, 0.0]},
    ),
    "word_sequence_reversal": Family(solve_word_sequence_reversal, {"min_words": 3, "max_words": 5}),
}
"""By their names in reasoning-gym."""
