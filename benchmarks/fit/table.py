# SPDX-License-Identifier: Apache-2.0
"""The tables of what a fit costs, and how often its intervals hold the truth."""

from __future__ import annotations

from benchmarks.fit.coverage import BENCH, is_reached
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


def coverage_table() -> str:
    """One line a cell of the newest study; a cell that misses what it should reach says so."""
    rows = newest_run(BENCH)
    heads = ("points", "noise", "R0", "A covered", "median width", "widened", "wrong and `identified`", "reached")
    lines = []
    for row in rows:
        case, counts = row["case"], row["error"]
        covered, wrong = (f"{counts[name] / case['fits']:.1%}" for name in ("covered", "identified_wrong"))
        reached = "yes" if is_reached(row) else "no"
        widths = (f"{counts['width']:.3f}", f"{counts['widening']:.2f}")
        lines.append((case["points"], case["noise"], case["R0"], covered, *widths, wrong, reached))
    return f"{table(heads, lines)}\n\n{where_table({'': rows[:1]}, ('torch',))}"
