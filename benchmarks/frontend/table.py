# SPDX-License-Identifier: Apache-2.0
"""The table of the front end's cost: medians over turns, side by side."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.frontend.turns import ENGINE, LIBRARY, OURS, VERL, WAYS
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
    """Two tables with one line a case: tokens a second of each way, and what a front end costs its process.

    Raises:
        ValueError: none is recorded.
    """
    cases = newest_cases(read_rows("frontend"))
    if not cases:
        raise ValueError("no rows of the front end are recorded: run python -m benchmarks.frontend.bench on a GPU")
    speeds, costs = [], []
    for (params, requests, tokens), rows in cases.items():
        case = (f"{params / 1e9:.2f}B", f"{requests} x {tokens:,}")
        rates = {name: _median(rows, name, lambda row: row["value"]) for name in WAYS}
        gains = [_shown(_ratio(rates[OURS], rates[name]), "{:.2f}") for name in (VERL, LIBRARY)]
        speeds.append((*case, *(_shown(rates[name], "{:,.0f}") for name in WAYS), *gains))
        busy = [_median(rows, name, lambda row: row["frontend_cpu_s"] / row["seconds"]) for name in (VERL, OURS)]
        grew = [_median(rows, name, lambda row: row.get("frontend_grew_mib")) for name in (VERL, OURS)]
        costs.append((*case, *(_shown(each, "{:.0%}") for each in busy), *(_shown(each, "{:,.0f}") for each in grew)))
    where = where_table({f"{key[0] / 1e9:.2f}B": rows[:1] for key, rows in cases.items()}, ("verl", "vllm", "torch"))
    return "\n\n".join((table(SPEED_HEADS, speeds), table(COST_HEADS, costs), where))


def _median(rows: list[Row], name: str, value: Any) -> float | None:
    found = [value(row) for row in rows if row["impl"] == name and not row["failed"]]
    known = [each for each in found if each is not None]
    return median(known) if known else None


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
