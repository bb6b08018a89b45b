# SPDX-License-Identifier: Apache-2.0
"""The table of the front end's cost: medians over turns, side by side."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.frontend.turns import ENGINE, LIBRARY, OURS, SERVED, VERL
from benchmarks.markdown import Row, table, where_table
from benchmarks.rows import read_rows

CASE_HEADS = ("parameters", "requests x tokens")
SPEED_HEADS = (
    *CASE_HEADS,
    "as verl asks",
    "fast front end",
    ENGINE,
    LIBRARY,
    "fast over verl's",
    f"fast over {LIBRARY}",
)
COST_HEADS = (*CASE_HEADS, "verl's busy", "the fast one busy", "verl's grew MiB", "the fast one grew MiB")


def cases_of(rows: list[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Case -> its rows, oldest first; small sizes, which are for trying out, are left out."""
    cases: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        case = row["case"]
        if case["size"] != "tiny":
            cases.setdefault((case["params"], case["requests"], case["tokens"]), []).append(row)
    return dict(sorted(cases.items()))


def newest_run(rows: list[Row], way: str) -> list[Row]:
    """Rows of the newest run that has a way: what is compared with it was measured together."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        runs[row["run_id"]] = [*runs.pop(row["run_id"], []), row]
    return next((found for found in reversed(runs.values()) if way in {row["impl"] for row in found}), [])


def frontend_table() -> str:
    """Two tables with one line a case: tokens a second of each way, and what a front end costs its process.

    Raises:
        ValueError: none is recorded.
    """
    cases = cases_of(read_rows("frontend"))
    if not cases:
        raise ValueError("no rows of the front end are recorded: run python -m benchmarks.frontend.bench on a GPU")
    speeds, costs = [], []
    where: dict[str, list[Row]] = {}
    for (params, requests, tokens), found in cases.items():
        case = (f"{params / 1e9:.2f}B", f"{requests} x {tokens:,}")
        rows, library = newest_run(found, VERL), newest_run(found, LIBRARY)
        rates = {name: _median(rows, name, lambda row: row["value"]) for name in SERVED}
        beside = {name: _median(library, name, lambda row: row["value"]) for name in (OURS, LIBRARY)}
        gains = [_ratio(rates[OURS], rates[VERL]), _ratio(beside[OURS], beside[LIBRARY])]
        cells = (_shown(rate, "{:,.0f}") for rate in (*rates.values(), beside[LIBRARY]))
        speeds.append((*case, *cells, *(_shown(gain, "{:.2f}") for gain in gains)))
        where.setdefault(case[0], []).extend([*rows[:1], *library[:1]])
        busy = [_median(rows, name, lambda row: row["frontend_cpu_s"] / row["seconds"]) for name in (VERL, OURS)]
        grew = [_median(rows, name, lambda row: row.get("frontend_grew_mib")) for name in (VERL, OURS)]
        costs.append((*case, *(_shown(each, "{:.0%}") for each in busy), *(_shown(each, "{:,.0f}") for each in grew)))
    places = where_table(where, ("verl", "vllm", "torch"))
    return "\n\n".join((table(SPEED_HEADS, speeds), table(COST_HEADS, costs), places))


def _median(rows: list[Row], name: str, value: Any) -> float | None:
    found = [value(row) for row in rows if row["impl"] == name and not row["failed"]]
    known = [each for each in found if each is not None]
    return median(known) if known else None


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
