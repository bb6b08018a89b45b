# SPDX-License-Identifier: Apache-2.0
"""The tables of the FP32 head's cost, in the trainer and in the generator."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import table, where_table
from benchmarks.rows import newest_run

OURS, PLAIN = "scalerl_verl", "bf16 logits"


def trainer_table() -> str:
    """One line a size and implementation of the newest run; errors against float64: largest, and relative norm."""
    rows = newest_run("fp32_head")
    heads = ("tokens x hidden x vocabulary", "implementation", "p20 ms", "p50 ms", "p80 ms", "peak GiB")
    lines = []
    for row in rows:
        case, error = row["case"], row["error"]
        lines.append(
            (
                f"{case['tokens']:,} x {case['hidden']:,} x {case['vocab']:,}",
                row["impl"],
                *("failed its check" if row["failed"] else f"{row[q]:.1f}" for q in ("p20", "p50", "p80")),
                f"{row.get('peak_gib', float('nan')):.2f}",
                f"{error['logp_max_abs']:.1e}",
                f"{max(error['grad_hidden_rel'], error['grad_weight_rel']):.1e}",
            )
        )
    where = where_table({"": rows[:1]}, ("verl", "torch", "triton"))
    return f"{table((*heads, 'log-prob error', 'gradient error'), lines)}\n\n{where}"


def generator_table() -> str:
    """One line a size, medians of the implementations side by side, and their errors, of the newest run."""
    rows = newest_run("vllm_head")
    names = list(dict.fromkeys(row["impl"] for row in rows))
    sizes: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        sizes.setdefault(_size(row), {})[row["impl"]] = row
    lines = [(size, *(_cell(found.get(name)) for name in names), _ratio(found)) for size, found in sizes.items()]
    errors = [max((_error(row) for row in rows if row["impl"] == name), default=0.0) for name in names]
    lines.append(("largest relative error against float64", *(f"{error:.1e}" for error in errors), ""))
    where = where_table({"": rows[:1]}, ("vllm", "torch"))
    return f"{table(('', *names, 'FP32 over bf16'), lines)}\n\n{where}"


def _size(row: dict[str, Any]) -> str:
    case = row["case"]
    if row["metric"] == "head_product":
        return f"head, batch {case['batch']}, hidden {case['hidden']:,} (ms)"
    return f"engine, {case['requests']} requests, {case['layers']} layers, hidden {case['hidden']:,} (tokens/s)"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or row["failed"]:
        return "" if row is None else "failed its check"
    return f"{row['p50']:,.0f}" if row["metric"] == "engine_throughput" else f"{row['p50']:,.3g}"


def _ratio(found: dict[str, dict[str, Any]]) -> str:
    pair = [found.get(name) for name in (OURS, PLAIN)]
    usable = [row["p50"] for row in pair if row is not None and not row["failed"]]
    return f"{usable[0] / usable[1]:.3f}" if len(usable) == 2 else ""


def _error(row: dict[str, Any]) -> float:
    return row["error"]["relative_error"] if row["error"] else 0.0
