# SPDX-License-Identifier: Apache-2.0
"""What may stand at a key, and what stands there if nobody says: kinds of values, all of one shape.

Every kind has a ``default``, and ``wrong(value)``: what to change if a value is not allowed, None if it is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Number:
    """A number within limits.

    Args:
        default: taken where the key is absent, or null where null is allowed.
        least: smallest value.
        whole: whether it has to be a whole number.
        null: whether null may stand there.
        most: greatest value.
        automatic: whether -1 may stand there for a value that verl finds itself.
        note: added to what is allowed.
    """

    default: float | None
    least: float = -math.inf
    whole: bool = True
    null: bool = False
    most: float = math.inf
    automatic: bool = False
    note: str = ""

    @property
    def stand_in(self) -> float | None:
        """A value that every check can read."""
        if self.default is not None or self.null:
            return self.default
        return self.least if math.isfinite(self.least) else 0

    def describe(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        limits = []
        if math.isfinite(self.least):
            limits.append(f"of {self.least:g} or more")
        if math.isfinite(self.most):
            limits.append(f"up to {self.most:g}")
        others = (", or -1" if self.automatic else "") + (", or null" if self.null else "")
        return " ".join([kind, *limits]) + others + self.note

    def wrong(self, value: Any) -> str | None:
        if value is None:
            return None if self.null else f"give {self.describe()}"
        if not is_number(value):
            hint = "; write it without quotes" if _is_quoted_number(value) else ""
            return f"give {self.describe()}{hint}"
        if self.whole and not isinstance(value, int):
            return f"write {int(value)}" if value == value // 1 else f"give {self.describe()}"
        allowed = self.least <= value <= self.most or (self.automatic and value == -1)
        return None if allowed else f"give {self.describe()}"


@dataclass(frozen=True)
class Value:
    """Whatever passes a test.

    Args:
        default: taken where the key is absent; where it is null, null may stand there.
        passes: the test; None: the section's own class looks at the value.
        change: what to say of a value that does not.
        words: those that pass, if only some do.
    """

    default: Any = None
    passes: Callable[[Any], bool] | None = None
    change: str = ""
    words: tuple[str, ...] = ()

    def wrong(self, value: Any) -> str | None:
        null = value is None and self.default is None
        return None if null or self.passes is None or self.passes(value) else self.change


Kind = Number | Value


def is_number(value: Any) -> bool:
    """Whether this is a number, True and False being none; nor is a whole one that no float can hold."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) <= sys.float_info.max
    return isinstance(value, float)


def _is_quoted_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return isinstance(value, str)


def whole(default: int | None = 1, least: int = 1, **more: Any) -> Number:
    """A whole number."""
    return Number(default, least, **more)


def real(default: float | None, least: float = -math.inf, **more: Any) -> Number:
    """Any number."""
    return Number(default, least, whole=False, **more)


def within(default: float | None, passes: Callable[[float], bool], what: str) -> Value:
    """A number within limits of another kind."""
    return Value(default, lambda value: is_number(value) and passes(value), f"give {what}")


def one_of(default: str | None, *words: str, otherwise: str = "") -> Value:
    """One of several words."""
    return Value(default, words.__contains__, f"use one of {', '.join(words)}{otherwise}", words)


def text(default: str | None, what: str) -> Value:
    """A text that is not empty."""
    return Value(default, is_text, f"give {what}")


def is_text(value: Any) -> bool:
    """Whether this is a text that is not empty."""
    return isinstance(value, str) and bool(value.strip())


def shown(value: Any) -> str:
    """A value as a user types it."""
    return "null" if value is None else repr(value) if isinstance(value, str) else str(value)


def wrong_values(values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> list[str]:
    """``key=value: what to change`` for each of some values that are not allowed."""
    changes = {key: kinds[key].wrong(value) for key, value in values.items()}
    return [f"{key}={shown(values[key])}: {change}" for key, change in changes.items() if change is not None]
