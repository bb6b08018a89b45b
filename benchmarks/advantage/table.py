# SPDX-License-Identifier: Apache-2.0
"""The table of the advantages' cost."""

from __future__ import annotations

from benchmarks.markdown import table, where_table
from benchmarks.rows import newest_run

RIVAL = "verl grpo"


def advantage_table() -> str:
    """One line an implementation of the newest run."""
    rows = newest_run("advantage")
    (rival,) = (row["p50"] for row in rows if row["impl"] == RIVAL)
    heads = ("implementation", "p20 ms", "p50 ms", "p80 ms", "share of verl's GRPO", "peak GiB")
    lines = [
        (row["impl"], *(f"{row[q]:.0f}" for q in ("p20", "p50", "p80")), f"{row['p50'] / rival:.2f}", _gib(row))
        for row in rows
    ]
    return f"{table(heads, lines)}\n\n{where_table({'': rows[:1]}, ('verl', 'torch'))}"


def _gib(row: dict) -> str:
    return "" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
