# SPDX-License-Identifier: Apache-2.0
"""What distinguishes runs that are compared over a setting (model size, responses a prompt, batch), by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
_NUMBER = re.compile(r"(\d+(?:[.]\d+)?(?:e[+-]?\d+)?)([kmb]?)", re.IGNORECASE)

Settings = Mapping[str, float]
"""Name of a setting -> its value."""


def read_settings(names: Iterable[str], pattern: str) -> dict[str, dict[str, float]]:
    """Settings of each run by its name.

    Args:
        names: of the runs.
        pattern: a regular expression with a named part for each setting, which is searched for in each name:
            ``n(?P<n>\\d+)-b(?P<batch>\\d+)``. A number may end in k, m or b (thousands, millions, billions).

    Raises:
        ValueError: not an expression, none with a named part, a name in which it is not found, or a part that is no
            positive number.
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--by {pattern} is no regular expression: {error}") from None
    if not expression.groupindex:
        raise ValueError(f"--by {pattern} names no setting: write (?P<n>\\d+), with n the name of the setting")
    found: dict[str, dict[str, float]] = {}
    for name in names:
        match = expression.search(name)
        if match is None:
            raise ValueError(f"--by {pattern} is not found in the run name {name}: change it, or name runs by --names")
        found[name] = {}
        for key, text in match.groupdict().items():
            _refuse_cut(name, match.span(key), key)
            try:
                found[name][key] = read_number(text or "")
            except ValueError as error:
                raise ValueError(f"{key} of the run {name}: {error}") from None
    return found


def _refuse_cut(name: str, span: tuple[int, int], key: str) -> None:
    """A part that begins or ends inside a number is another number: 1 of n16, 5 of 0.5b.

    Raises:
        ValueError: it does.
    """
    before, part, after = name[: span[0]], name[slice(*span)], name[span[1] :]
    begins, ends = re.match(r"[.\d]", part), re.search(r"[.\d]$", part)
    if (begins and re.search(r"\d[.]?$", before)) or (ends and re.match(r"[.]?\d", after)):
        raise ValueError(
            f"--by finds {key}={part}, which is only a part of a number in the run name {name}: match the whole "
            r"number, as (?P<n>\d+) or (?P<size>[\d.]+b) do"
        )


def read_number(text: str) -> float:
    """A positive number, which may end in k, m or b.

    Raises:
        ValueError: it is none.
    """
    match = _NUMBER.fullmatch(text)
    value = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    if value <= 0:
        raise ValueError(f"'{text}' is no positive number (16, 0.5b, 1.7B, 135m)")
    return value


def describe(settings: Settings) -> str:
    """``n=16, batch=256``."""
    return ", ".join(f"{key}={value:g}" for key, value in settings.items())
