# SPDX-License-Identifier: Apache-2.0
"""The table of a training step's cost, of the newest run of each way."""

from __future__ import annotations

from benchmarks.markdown import Row, table, where_table
from benchmarks.rows import read_rows
from benchmarks.step.runs import GRPO, WAYS

HEADS = ("way", "step p50 s", "of verl's", "generation s", "old log-probs s", "update s", "trainer's peak GiB",
         "`scalerl plan` said GiB", "steps measured")  # fmt: skip


def newest(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Way -> metric -> row, of the newest run of each; small sizes, which are for trying out, are left out."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["case"]["size"] != "cpu":
            found.setdefault(row["impl"], {})[row["metric"]] = row
    return {way: found[way] for way in WAYS if way in found}


def _ways() -> dict[str, dict[str, Row]]:
    ways = newest(read_rows("step"))
    if not ways:
        raise ValueError("no rows of a training step are recorded: run python -m benchmarks.step.bench on a GPU")
    return ways


def _seconds(ways: dict[str, dict[str, Row]], way: str) -> tuple[str, str]:
    """Of a step, and over verl's."""
    step, verls = (ways.get(name, ways[way])["step_s"]["p50"] for name in (way, GRPO))
    return f"{step:.1f}", f"{step / verls:.2f}"


def step_table() -> str:
    """One line a way: where the time of a step goes, and the trainer's memory.

    Raises:
        ValueError: none is recorded.
    """
    ways = _ways()
    lines = []
    for way, rows in ways.items():
        cells = [_shown(rows, name) for name in ("gen_s", "old_log_prob_s", "update_actor_s", "trainer_allocated_gib")]
        steps = rows["step_s"]["case"]["steps"]
        lines.append([way, *_seconds(ways, way), *cells, _shown(rows, "planned_trainer_gib"), steps])
    where = where_table({way: [rows["step_s"]] for way, rows in ways.items()}, ("verl", "vllm", "torch"))
    return f"{table(HEADS, lines)}\n\n{where}"


def short_table() -> str:
    """Seconds of a step and the trainer's memory alone, of verl's GRPO and the recipe.

    Raises:
        ValueError: none is recorded.
    """
    ways = _ways()
    heads = ("", "step p50 s", "of verl's", "trainer's peak GiB", "`scalerl plan` said")
    gib = ("trainer_allocated_gib", "planned_trainer_gib")
    lines = [[way, *_seconds(ways, way), *(_shown(rows, name) for name in gib)] for way, rows in ways.items()]
    return table(heads, lines)


def _shown(rows: dict[str, Row], metric: str) -> str:
    return f"{rows[metric]['p50']:.1f}" if metric in rows else ""
