# SPDX-License-Identifier: Apache-2.0
"""What may stand at a key, and what stands there if nobody says: kinds of values, all of one shape.

Every kind has a ``default``, and ``wrong(value)``: what to change if a value is not allowed, None if it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

INF = math.inf


class Kind(Protocol):
    """What may stand at a key."""

    @property
    def default(self) -> Any:
        """Taken where the key is absent."""

    def wrong(self, value: Any) -> str | None:
        """What to change if ``value`` is not allowed; None if it is."""


@dataclass(frozen=True)
class Number:
    """A number.

    Args:
        default: taken where the key is absent, or null where null is allowed.
        least: smallest value.
        whole: whether it has to be a whole number.
        null: whether null may stand there.
        most: greatest value.
        automatic: whether -1 may stand there for a value that verl finds itself.
        above: what it has to exceed.
        below: what it has to stay under; infinity: any finite number.
        unit: what is counted.
        note: added to what is allowed.
    """

    default: float | None
    least: float = -INF
    whole: bool = True
    null: bool = False
    most: float = INF
    automatic: bool = False
    above: float | None = None
    below: float | None = None
    unit: str = ""
    note: str = ""

    @property
    def stand_in(self) -> float | None:
        """A value that every check can read."""
        if self.default is not None or self.null:
            return self.default
        return self.least if math.isfinite(self.least) else 0

    def describe(self) -> str:
        others = (", or -1" if self.automatic else "") + (", or null" if self.null else "")
        return self._kind() + self._limits() + others + self.note

    def _kind(self) -> str:
        positive = self.above == 0 and self.below in (None, INF) and self.most == INF
        sign = "positive " if positive else "finite " if self.below == INF else ""
        return f"a {sign}{'whole ' if self.whole else ''}number" + (f" of {self.unit}" if self.unit else "")

    def _limits(self) -> str:
        limits = [f"of {self.least:g} or more"] if math.isfinite(self.least) else []
        if self.above:
            limits.append(f"above {self.above:g}")
        elif self.above == 0 and (self.most < INF or self.below not in (None, INF)):
            limits.append("above 0")
        if math.isfinite(self.most):
            limits.append(f"{'up to' if self.above is None else 'at most'} {self.most:g}")
        if self.below not in (None, INF):
            limits.append(f"below {self.below:g}")
        if not limits:
            return ""
        text = " and ".join(limits) if self.above is not None else " ".join(limits)
        return f", {text.removeprefix('of ')}" if self.unit else f" {text}"

    def wrong(self, value: Any) -> str | None:
        if value is None:
            return None if self.null else f"give {self.describe()}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            hint = "; write it without quotes" if _is_number(value) else ""
            return f"give {self.describe()}{hint}"
        if self.whole and not isinstance(value, int):
            return f"write {int(value)}" if value == value // 1 else f"give {self.describe()}"
        within = (self.above is None or value > self.above) and (self.below is None or value < self.below)
        allowed = (self.least <= value <= self.most and within) or (self.automatic and value == -1)
        return None if allowed else f"give {self.describe()}"


def _is_number(value: Any) -> bool:
    try:
        float(str(value))
    except ValueError:
        return False
    return not isinstance(value, bool)


def whole(default: int | None = 1, least: int = 1, **more: Any) -> Number:
    return Number(default, least, **more)


def real(default: float | None, least: float = -INF, **more: Any) -> Number:
    return Number(default, least, whole=False, **more)


@dataclass(frozen=True)
class Choice:
    """One of several words.

    Args:
        default: taken where the key is absent.
        allowed: the words.
        note: added to them.
    """

    default: str | None
    allowed: tuple[str, ...]
    note: str = ""

    def wrong(self, value: Any) -> str | None:
        given = value is not None or self.default is not None
        return f"use one of {', '.join(self.allowed)}{self.note}" if given and value not in self.allowed else None


@dataclass(frozen=True)
class Fixed:
    """A key of verl's that has one value here.

    Args:
        default: the value.
        why: no other.
    """

    default: Any
    why: str

    def wrong(self, value: Any) -> str | None:
        return None if value == self.default else f"{self.why}; leave it {self.default}"


@dataclass(frozen=True)
class Other:
    """Anything that passes a test.

    Args:
        default: taken where the key is absent; null may stand there if it is null.
        passes: the test; None: the section's own class looks at it.
        what: what passes, for messages.
    """

    default: Any = None
    passes: Callable[[Any], bool] | None = None
    what: str = ""

    def wrong(self, value: Any) -> str | None:
        null = value is None and self.default is None
        allowed = null or self.passes is None or self.passes(value)
        return None if allowed else f"give {self.what}{', or null' if self.default is None else ''}"


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def text(default: str | None, what: str) -> Other:
    return Other(default, is_text, what)


def switch(default: bool) -> Other:
    return Other(default, lambda value: isinstance(value, bool), "True or False")


def shown(value: Any) -> str:
    """A value as a user types it."""
    return "null" if value is None else repr(value) if isinstance(value, str) else str(value)


def wrong_values(values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> list[str]:
    """``key=value: what to change`` for each of some values that are not allowed."""
    changes = {key: kinds[key].wrong(value) for key, value in values.items()}
    return [f"{key}={shown(values[key])}: {change}" for key, change in changes.items() if change is not None]
