# SPDX-License-Identifier: Apache-2.0
"""The tables of the pipeline benchmark and of weight updates."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import table, where_table
from benchmarks.rows import newest_run, read_rows

Rows = list[dict[str, Any]]
COLUMNS = (
    ("trained tokens/s", "trained_tokens_per_s", "p50", "{:,.0f}"),
    ("generator idle", "generator_idle_fraction", "p50", "{:.1%}"),
    ("pause per update p50 ms", "pause_s", "p50", "{:,.0f}"),
    ("tokens prefilled again per update", "prefilled_again_tokens", "p50", "{:,.0f}"),
    ("step p50 s", "step_s", "p50", "{:.2f}"),
    ("step p95 s", "step_s", "p95", "{:.2f}"),
)
SIMULATOR = "simulator: "
RIVAL = "separate_async"
SPEED = "trained_tokens_per_s"


def _run(run_id: str) -> Rows:
    rows = [row for row in read_rows("pipeline") if row["run_id"] == run_id]
    if not rows:
        raise ValueError(f"benchmarks/results/pipeline.jsonl has no run {run_id}")
    return rows


def _found(rows: Rows) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {(row["case"]["regime"], row["impl"], row["metric"]): row for row in rows if not _is_simulated(row)}


def _is_simulated(row: dict[str, Any]) -> bool:
    return row["impl"].startswith(SIMULATOR)


def pipeline_table(run_id: str) -> str:
    """One line a regime and mode of a run."""
    rows = _run(run_id)
    found = _found(rows)
    lines = []
    for regime, mode in dict.fromkeys((regime, mode) for regime, mode, _ in found):
        cells = []
        for _, metric, quantile, form in COLUMNS:
            row = found.get((regime, mode, metric))
            cells.append(form.format(row[quantile] * (1e3 if metric == "pause_s" else 1)) if row else "")
        note = found[regime, mode, SPEED].get("note", "") if (regime, mode, SPEED) in found else ""
        lines.append((regime, mode, *cells, _of_rival(found, regime, mode), note))
    heads = ("regime", "mode", *(name for name, *_ in COLUMNS), f"of {RIVAL}'s tokens/s", "note")
    by_mode = {mode: [row] for (_, mode, _), row in found.items()}
    return f"{table(heads, lines)}\n\n{where_table(by_mode, ('verl', 'vllm', 'torch'))}"


def _of_rival(found: dict[tuple[str, str, str], dict[str, Any]], regime: str, mode: str) -> str:
    mine, rival = (found.get((regime, name, SPEED)) for name in (mode, RIVAL))
    return f"{mine['p50'] / rival['p50']:.2f}" if mine and rival else ""


def driver_table() -> str:
    """One line a part of the driver's work, of the newest run."""
    rows = newest_run("driver")
    lines = [(row["case"]["what"], f"{1e3 * row['p50']:.1f}") for row in rows]
    return f"{table(('part', 'CPU ms'), lines)}\n\n{where_table({'': rows}, ('verl', 'ray'))}"


def weight_update_table() -> str:
    """One line a model and way of the newest run of each model."""
    rows = read_rows("weight_update")
    newest = {row["case"]["parameters"]: row["run_id"] for row in rows}
    rows = [row for row in rows if row["run_id"] in newest.values()]
    found = {(row["case"]["parameters"], row["impl"], row["metric"]): row for row in rows}
    lines = []
    for size, way in dict.fromkeys((size, way) for size, way, _ in found):
        pause, swap, staging = (found[size, way, metric] for metric in ("pause_s", "swap_s", "staging_s"))
        pauses = " / ".join(f"{1e3 * pause[q]:.1f}" for q in ("p20", "p50", "p80"))
        lines.append((f"{size / 1e9:.2f}B", way, pauses, *(f"{1e3 * row['p50']:.1f}" for row in (swap, staging))))
    heads = ("parameters", "way", "pause p20 / p50 / p80 ms", "loading p50 ms", "staging beforehand p50 ms")
    return f"{table(heads, lines)}\n\n{where_table({'': rows}, ('vllm', 'torch'))}"
