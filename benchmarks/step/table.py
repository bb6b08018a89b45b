# SPDX-License-Identifier: Apache-2.0
"""The table of a training step's cost, of the newest run of each way."""

from __future__ import annotations

from benchmarks.markdown import Row, table, where_table
from benchmarks.rows import read_rows
from benchmarks.step.runs import GRPO, WAYS

HEADS = ("way", "step p20 / p50 / p80 s", "of verl's", "generation s", "old log-probs s", "update s",
         "trainer's peak GiB", "scalerl plan said GiB")  # fmt: skip


def newest(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Way -> metric -> row, of the newest run of each; small sizes, which are for trying out, are left out."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["case"]["size"] != "cpu":
            found.setdefault(row["impl"], {})[row["metric"]] = row
    return {way: found[way] for way in WAYS if way in found}


def step_table() -> str:
    """One line a way.

    Raises:
        ValueError: none is recorded.
    """
    ways = newest(read_rows("step"))
    if not ways:
        raise ValueError("no rows of a training step are recorded: run python -m benchmarks.step.bench on a GPU")
    lines = []
    for way, rows in ways.items():
        step, verls = rows["step_s"], ways.get(GRPO, rows)["step_s"]
        cells = [way, " / ".join(f"{step[q]:.1f}" for q in ("p20", "p50", "p80")), f"{step['p50'] / verls['p50']:.2f}"]
        cells += [_shown(rows, name) for name in ("gen_s", "old_log_prob_s", "update_actor_s")]
        lines.append([*cells, _shown(rows, "trainer_allocated_gib"), _shown(rows, "planned_trainer_gib")])
    where = where_table({way: [rows["step_s"]] for way, rows in ways.items()}, ("verl", "vllm", "torch"))
    return f"{table(HEADS, lines)}\n\n{where}"


def _shown(rows: dict[str, Row], metric: str) -> str:
    return f"{rows[metric]['p50']:.1f}" if metric in rows else ""
