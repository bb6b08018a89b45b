# SPDX-License-Identifier: Apache-2.0
"""The table of what a fit costs."""

from __future__ import annotations

from benchmarks.markdown import table, where_table
from benchmarks.rows import newest_run


def fit_table() -> str:
    """One line an implementation of the newest run."""
    rows = newest_run("fit")
    (literal,) = (row["p50"] for row in rows if "literal" in row["impl"])
    heads = ("fit", "p20 ms", "p50 ms", "p80 ms", "literal loop / this", "sum of squares")
    lines = [
        (
            row["impl"],
            *(f"{row[q]:.1f}" for q in ("p20", "p50", "p80")),
            f"{literal / row['p50']:.0f}",
            f"{row['error']['sse']:.6f}",
        )
        for row in rows
    ]
    return f"{table(heads, lines)}\n\n{where_table({'': rows[:1]}, ('torch',))}"
