# SPDX-License-Identifier: Apache-2.0
"""Numbers and steps as logs write them, and what was left out of a log, with the reason.

Every reader has the same answers: NaN, null and the text "NaN" are a value that is none, an empty cell is no value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

NOT_A_NUMBER = ("nan", "na", "n/a", "null", "none", "-")
THOUSANDS = re.compile(r"[1-9]\d{0,2}(,\d{3})+(\.0*)?")
"""A whole number as spreadsheets and some trackers write it: 1,000."""
MAX_STEP = 2**53
"""A float beyond it is no exact number of a step."""
MAX_PLACES = 3
MAX_SHOWN = 80


class LeftOut:
    """Rows that were not used: how many, why, and where the first of them stand."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}

    def add(self, reason: str, place: str = "") -> None:
        """Count one row."""
        self._places.setdefault(reason, []).append(place)

    def notes(self, source: str) -> list[str]:
        """A sentence for each reason."""
        found = []
        for reason, places in self._places.items():
            named = [place for place in places if place]
            shown = ", ".join(named[:MAX_PLACES]) + (", ..." if len(named) > MAX_PLACES else "")
            found.append(f"{source}: {count(len(places), 'row')} left out: {reason}" + (f" ({shown})" if shown else ""))
        return found


def count(number: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def read_number(value: Any) -> float | None:
    """A number; nan for a value that says it is none, None for an empty cell.

    Raises:
        ValueError: it is something else.
    """
    if value is None:
        return math.nan
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is no number")
    if isinstance(value, str):
        text = value.strip()
        if not text:
            return None
        if text.lower() in NOT_A_NUMBER:
            return math.nan
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{text!r} is no number") from None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:  # a whole number of more than 308 digits, as text of it is infinite
            return math.inf if value > 0 else -math.inf
    raise ValueError(f"{value!r} is no number")


def read_numbers(values: Mapping[str, Any], faults: dict[str, str] | None = None, place: str = "") -> dict[str, float]:
    """The numbers among the values of a logged row, nan among them; texts, lists and empty values are none.

    Args:
        values: by name.
        faults: takes for each name the first value that is no number, with its place: of a metric that is chosen it is
            one too many.
        place: of the row, with its file.
    """
    found = {}
    for name, value in values.items():
        try:
            number = read_number(value)
        except ValueError as error:
            if faults is not None:
                faults.setdefault(name, f"{place}: {name}: {_shorten(str(error))}: correct it or leave the row out")
            continue
        if number is not None:
            found[name] = number
    return found


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."


def read_step(value: Any, has_thousands: bool = True) -> int | str:
    """The number of a step, or the reason to leave its row out.

    Args:
        value: of the column of steps.
        has_thousands: `1,000` is a thousand; otherwise it is refused, for the comma may be a decimal one.

    Raises:
        ValueError: no number, or none of a step.
    """
    if isinstance(value, str) and THOUSANDS.fullmatch(value.strip()):
        if not has_thousands:
            raise ValueError(f"{value.strip()!r} is a thousand or a decimal comma: write it without the comma")
        value = value.strip().replace(",", "")
    try:
        number = read_number(value)
    except ValueError:
        raise ValueError(f"{value!r} is no number of a step: correct it or leave the row out") from None
    if number is None or math.isnan(number):
        return "it has no step"
    if math.isinf(number):
        return "its step is infinite"
    if number < 0:
        return "its step is negative"
    if number != int(number) or number > MAX_STEP:
        raise ValueError(f"{value!r} is no whole number: give a column of steps, or rename this one and use it as --x")
    return int(number)
