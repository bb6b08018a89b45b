# SPDX-License-Identifier: Apache-2.0
"""The table of the front end's cost: medians over turns, side by side."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.frontend.bench import ENGINE, OURS, VERL, WAYS
from benchmarks.markdown import Row, table, where_table
from benchmarks.rows import read_rows

HEADS = ("parameters", "requests x tokens", "as verl asks", "fast front end", "engine alone")


def newest_cases(rows: list[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Case -> its rows of the newest run that has it; small sizes, which are for trying out, are left out."""
    newest: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        case = row["case"]
        if case["size"] == "tiny":
            continue
        found = newest.setdefault((case["params"], case["requests"], case["tokens"]), [])
        if found and found[-1]["run_id"] != row["run_id"]:
            found.clear()
        found.append(row)
    return dict(sorted(newest.items()))


def frontend_table() -> str:
    """One line a case: tokens a second of each way, what the fast one gains, and how busy the front ends are.

    Raises:
        ValueError: none is recorded.
    """
    cases = newest_cases(read_rows("frontend"))
    if not cases:
        raise ValueError("no rows of the front end are recorded: run python -m benchmarks.frontend.bench on a GPU")
    lines = []
    for (params, requests, tokens), rows in cases.items():
        rates = {name: _median(rows, name, lambda row: row["value"]) for name in WAYS}
        busy = {name: _median(rows, name, lambda row: row["frontend_cpu_s"] / row["seconds"]) for name in (VERL, OURS)}
        lines.append(
            (
                f"{params / 1e9:.2f}B",
                f"{requests} x {tokens:,}",
                *(_shown(rates[name], "{:,.0f}") for name in WAYS),
                _shown(_ratio(rates[OURS], rates[VERL]), "{:.2f}"),
                _shown(_ratio(rates[OURS], rates[ENGINE]), "{:.2f}"),
                *(_shown(busy[name], "{:.0%}") for name in (VERL, OURS)),
            )
        )
    heads = (*HEADS, "fast over verl's", "fast over engine alone", "verl's front end busy", "the fast one busy")
    where = where_table({f"{key[0] / 1e9:.2f}B": rows[:1] for key, rows in cases.items()}, ("verl", "vllm", "torch"))
    return f"{table(heads, lines)}\n\n{where}"


def _median(rows: list[Row], name: str, value: Any) -> float | None:
    found = [value(row) for row in rows if row["impl"] == name and not row["failed"]]
    return median(found) if found else None


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
