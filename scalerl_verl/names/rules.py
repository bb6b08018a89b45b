# SPDX-License-Identifier: Apache-2.0
"""The shape of a start-up check: a rule says what is wrong with a config, a line each, and what to set instead.

A rule is a small function, or a row where a key may only have certain values. Rooms keep their rules beside their
settings; `scalerl_verl.config.checks` has the table of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.names.reading import select

Rule = Callable[[Any], Iterable[str]]


@dataclass(frozen=True)
class Row:
    """A key that may only have certain values.

    Args:
        path: of the key.
        allowed: its values.
        text: what follows ``path=value`` in the message.
        default: what stands for the value where the key is absent or null.
    """

    path: str
    allowed: tuple[Any, ...]
    text: str
    default: Any = None

    def __call__(self, config: Any) -> Iterator[str]:
        given = select(config, self.path, self.default)
        if given not in self.allowed:
            yield f"{self.path}={given}{self.text}"


def under(condition: Callable[[Any], Any], *rules: Rule) -> Rule:
    """Rules for the configs that a condition holds for."""
    return lambda config: broken(rules, config) if condition(config) else ()


def then(first: Rule, *rules: Rule) -> Rule:
    """Rules that mean something only where a first one holds."""
    return lambda config: list(first(config)) or broken(rules, config)


def broken(rules: Iterable[Rule], config: Any) -> Iterator[str]:
    """What a config breaks of several rules."""
    return chain.from_iterable(rule(config) for rule in rules)


def refusals(read: Callable[..., Any], *arguments: Any) -> list[str]:
    """What a reader refuses, a line each."""
    try:
        read(*arguments)
    except ScaleRLConfigError as error:
        return list(error.problems)
    return []


def one_of(words: Iterable[str]) -> str:
    """What to say of a word that is none of these."""
    return f"use one of {', '.join(words)}"


def or_null(value: Any) -> Any:
    """A value as it is typed on a command line."""
    return "null" if value is None else value


def read_by(path: str, reader: str, key: str, value: str, given: Any) -> str:
    """What to say of a section whose reader the run does not have: another key chooses it."""
    return f"{path} is read by {reader} only, but {key}={given}: set {key}={value} or delete the section (~{path})"
