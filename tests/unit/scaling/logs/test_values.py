# SPDX-License-Identifier: Apache-2.0
"""Numbers and steps: read, left out with a reason, or refused; what was left out is counted."""

from __future__ import annotations

import math

import pytest

from scalerl_verl.scaling.logs.values import LeftOut, read_number, read_step


@pytest.mark.parametrize(
    ("value", "number"), [("0.5", 0.5), (" 1e3 ", 1000.0), (3, 3.0), ("", None), ("  ", None), (-(10**400), -math.inf)]
)
def test_number_or_nothing(value: object, number: float | None) -> None:
    assert read_number(value) == number


@pytest.mark.parametrize("value", [None, "NaN", "nan", "null", "None", "-", "n/a", math.nan])
def test_value_that_says_it_is_none_is_nan(value: object) -> None:
    number = read_number(value)
    assert number is not None and math.isnan(number)


@pytest.mark.parametrize("value", ["oops", "0,31", True, [1], {}])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError):
        read_number(value)


@pytest.mark.parametrize(
    ("value", "step"),
    [("10", 10), ("10.0", 10), ("1.0E+02", 100), (0, 0), ("1,000", 1000), ("12,345,678", 12345678), ("2,000.0", 2000)],
)
def test_step_in_every_notation(value: object, step: int) -> None:
    assert read_step(value) == step


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "no step"),
        (None, "no step"),
        ("NaN", "no step"),
        ("Infinity", "infinite"),
        (-1, "negative"),
        ("-inf", "inf"),
    ],
)
def test_step_that_is_none_gives_the_reason(value: object, reason: str) -> None:
    answer = read_step(value)
    assert isinstance(answer, str) and reason in answer


@pytest.mark.parametrize("value", ["ten", "10.5", 0.5, "1,00", "0,500", True, 1e300])
def test_step_that_is_no_whole_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError):
        read_step(value)


def test_thousand_is_refused_where_the_comma_may_be_a_decimal_one() -> None:
    with pytest.raises(ValueError, match="a thousand or a decimal comma"):
        read_step("1,000", has_thousands=False)


def test_left_out_rows_are_counted_by_reason_with_their_first_places() -> None:
    left_out = LeftOut()
    for line in range(5):
        left_out.add("its step is negative", f"line {line}")
    left_out.add("it has no step")
    several, one = left_out.notes("a.csv")
    assert several.startswith("a.csv: 5 rows left out: its step is negative (line 0, line 1, line 2, ...")
    assert one == "a.csv: 1 row left out: it has no step"
    assert LeftOut().notes("a.csv") == []
