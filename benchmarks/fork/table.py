# SPDX-License-Identifier: Apache-2.0
"""The table of the fork: where seeds end, and how many of them learnt to think."""

from __future__ import annotations

import statistics

from scipy.stats import binomtest

from benchmarks.evidence.compare import half_width
from benchmarks.fork.bench import BENCH, THINKS
from benchmarks.markdown import table, where_table
from benchmarks.rows import newest_run

LABELS = {"cispo": "CISPO", "clip": "clip .2 / .2", "clip_higher": "clip .2 / .28"}


def fork_table() -> str:
    """One line a learning rate, number of steps and loss of the newest run."""
    rows = sorted(newest_run(BENCH), key=lambda row: (row["case"]["lr"], row["case"]["k"]))
    heads = (
        "learning rate", "steps a batch", "loss", "pass rate at the end", "seeds that think", "tokens clipped",
        "mean abs. log-ratio",
    )  # fmt: skip
    lines = []
    for row in rows:
        points, case = row["points"], row["case"]
        ends, num = points["ends"], sum(share > THINKS for share in points["thinks"])
        at = binomtest(num, len(ends)).proportion_ci(method="wilson")
        end = f"{statistics.fmean(ends):.3f} ± {half_width(ends):.3f}"
        thinks = f"{num} of {len(ends)} ({at.low:.0%} to {at.high:.0%})"
        logged = (f"{points['clipped']:.2%}", f"{points['log_ratio']:.3f}")
        lines.append((f"{case['lr']:g}", case["k"], LABELS[row["impl"]], end, thinks, *logged))
    return f"{table(heads, lines)}\n\n{where_table({'': rows[:1]}, ('verl', 'torch'))}"
