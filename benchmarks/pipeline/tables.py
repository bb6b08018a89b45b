# SPDX-License-Identifier: Apache-2.0
"""The table of the pipeline benchmark, from its recorded rows."""

from __future__ import annotations

from typing import Any

from benchmarks.rows import commits_text, read_rows, versions_text

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


def pipeline_table() -> str:
    """The newest run, then the one before it with other sizes."""
    rows = read_rows("pipeline")
    if not rows:
        return "Not recorded yet: `python -m benchmarks.pipeline.bench`."
    newest = list(dict.fromkeys(row["run_id"] for row in reversed(rows)))[:2]
    return "\n\n".join(_table_of_run([row for row in rows if row["run_id"] == run_id]) for run_id in newest)


def _table_of_run(rows: list[dict[str, Any]]) -> str:
    """One line a regime and mode, then what the simulator makes of it."""
    measured = [row for row in rows if not row["impl"].startswith(SIMULATOR)]
    found = {(row["case"]["regime"], row["impl"], row["metric"]): row for row in measured}
    names = [name for name, *_ in COLUMNS]
    lines = [f"| regime | mode | {' | '.join(names)} | of {RIVAL}'s tokens/s |", "|---" * (len(names) + 3) + "|"]
    noted: dict[str, list[str]] = {}
    for regime, mode in dict.fromkeys((row["case"]["regime"], row["impl"]) for row in measured):
        cells = []
        for _, metric, quantile, form in COLUMNS:
            row = found.get((regime, mode, metric))
            scale = 1e3 if metric == "pause_s" else 1
            cells.append(form.format(row[quantile] * scale) if row else "")
        speed, rival = (found.get((regime, name, "trained_tokens_per_s")) for name in (mode, RIVAL))
        cells.append(f"{speed['p50'] / rival['p50']:.2f}" if speed and rival else "")
        lines.append(f"| {regime} | {mode} | {' | '.join(cells)} |")
        if speed and "note" in speed:
            noted.setdefault(speed["note"], []).append(mode)
    return "\n".join([*lines, "", _footer(measured, noted), *_simulated(rows, found)])


def weight_update_table() -> str:
    """One line a model and way of the newest run of each model."""
    rows = read_rows("weight_update")
    newest = {row["case"]["parameters"]: row["run_id"] for row in rows}
    rows = [row for row in rows if row["run_id"] in newest.values()]
    if not rows:
        return "Not recorded yet: `python -m benchmarks.pipeline.weight_update`."
    found = {(row["case"]["parameters"], row["impl"], row["metric"]): row for row in rows}
    names = ("parameters", "way", "pause p20 / p50 / p80 ms", "loading p50 ms", "staging beforehand p50 ms")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for size, way in dict.fromkeys((row["case"]["parameters"], row["impl"]) for row in rows):
        pause, swap, staging = (found[size, way, metric] for metric in ("pause_s", "swap_s", "staging_s"))
        cells = [f"{size / 1e9:.2f}B", way, " / ".join(f"{1e3 * pause[q]:.1f}" for q in ("p20", "p50", "p80"))]
        cells += [f"{1e3 * row['p50']:.1f}" for row in (swap, staging)]
        lines.append(f"| {' | '.join(cells)} |")
    last = rows[-1]
    versions = versions_text(last, ("vllm", "torch"))
    footer = (
        f"{last['case']['requests']} requests under way, {last['hardware']}, {versions}, commit "
        f"{commits_text(rows)}; `benchmarks/pipeline/weight_update.py`, which "
        "says what the ways are."
    )
    return "\n".join([*lines, "", footer])


def _footer(rows: list[dict[str, Any]], noted: dict[str, list[str]]) -> str:
    last, case = rows[-1], rows[0]["case"]
    notes = "".join(f"; while {', '.join(dict.fromkeys(modes))} ran, {note}" for note, modes in noted.items())
    versions = versions_text(last, ("verl", "vllm", "torch"))
    return (
        f"A random Qwen3-shaped model of {case['layers']} layers and width {case['hidden']:,}, batches of "
        f"{case['prompts']} prompts x {case['group']}, {case['slots']} sequences at a time, k = {case['k']}; "
        f"{last['num_devices']} x {last['hardware']}, one host for all{notes}; {versions}; commit "
        f"`{last['commit'][:10]}`{' (dirty)' if last['dirty'] else ''}; one line of `benchmarks.pipeline.bench` a mode."
    )


def _simulated(rows: list[dict[str, Any]], found: dict[tuple[str, str, str], dict[str, Any]]) -> list[str]:
    """Ratios to the rival, measured and simulated, at the size that was measured and beyond."""
    simulated = [row for row in rows if row["impl"].startswith(SIMULATOR)]
    if not simulated:
        return []
    speeds = {
        (row["case"]["regime"], row["case"]["simulated_devices"], row["impl"].removeprefix(SIMULATOR)): row["p50"]
        for row in simulated
    }
    sizes = sorted({devices for _, devices, _ in speeds})
    head = " | ".join(f"simulated, {devices:,} devices" for devices in sizes)
    lines = ["", f"| regime | mode, over {RIVAL} | measured | {head} |", "|---" * (len(sizes) + 3) + "|"]
    for regime, mode in dict.fromkeys((regime, mode) for regime, _, mode in speeds):
        mine, rival = (found.get((regime, name, "trained_tokens_per_s")) for name in (mode, RIVAL))
        if mode == RIVAL or not (mine and rival):
            continue
        ratios = [f"{speeds[regime, size, mode] / speeds[regime, size, RIVAL]:.2f}" for size in sizes]
        lines.append(f"| {regime} | {mode} | {mine['p50'] / rival['p50']:.2f} | {' | '.join(ratios)} |")
    return lines
