# SPDX-License-Identifier: Apache-2.0
"""Draw docs/smollm2.png of a recorded run: held-out pass rate against generated tokens, in all and by family.

    python -m benchmarks.reasoning.picture [--recipe ScaleRL] [--seed 0]

Nothing is smoothed or fitted: a point is a validation, lines join them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.markdown import Row
from benchmarks.reasoning.table import read_runs
from benchmarks.rows import REPO

PICTURE = REPO / "docs" / "smollm2.png"
MARKERS = ("s", "^", "D", "v", "P", "X")


def draw(rows: list[Row], path: Path) -> None:
    """Bars are one standard error over problems."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    millions = [row["generated_tokens"] / 1e6 for row in rows]
    start, final = rows[0], rows[-1]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    # slightly apart, so that bars of families that lie on each other can be told
    apart = 0.004 * millions[-1]
    families = sorted(start["families"], key=lambda name: -final["families"][name][0])
    for index, (family, marker) in enumerate(zip(families, MARKERS, strict=False)):
        rates, errors = zip(*(row["families"][family] for row in rows), strict=True)
        places = [value + (index - (len(families) - 1) / 2) * apart for value in millions]
        axes.errorbar(
            places, rates, errors, marker=marker, markersize=4, linewidth=1, capsize=2, alpha=0.6,
            color=f"C{index + 1}", label=family,
        )  # fmt: skip
    rates, errors = ([row[name] for row in rows] for name in ("pass_rate", "stderr"))
    axes.errorbar(
        millions, rates, errors, marker="o", color="black", linewidth=2.2, capsize=3, zorder=5,
        label=f"all {start['num_problems']:.0f} problems",
    )  # fmt: skip
    ends = f"{start['pass_rate']:.0%} to {final['pass_rate']:.0%}"
    axes.set_title(f"SmolLM2-135M-Instruct on reasoning-gym: held-out pass rate {ends}", fontsize=12.5)
    axes.set_xlabel("generated tokens (millions)", fontsize=12)
    axes.set_ylabel("pass rate on held-out problems", fontsize=12)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.set_ylim(0, 1)
    axes.set_xlim(left=-0.02 * millions[-1])
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend([handles[-1], *handles[:-1]], [labels[-1], *labels[:-1]], loc="lower right", fontsize=10)
    axes.text(0.3, 0.03, "bars: ±1 standard error", transform=axes.transAxes, fontsize=9, color="0.35")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Draw the run of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="ScaleRL", help="as the table names it, default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--out", type=Path, default=PICTURE, help="default docs/smollm2.png")
    options = parser.parse_args(argv)
    runs = read_runs()
    if (options.recipe, options.seed) not in runs:
        known = ", ".join(f"{recipe} {seed}" for recipe, seed in runs)
        print(f"error: {options.recipe} with seed {options.seed} is not recorded; there are {known}", file=sys.stderr)
        return 1
    draw(runs[options.recipe, options.seed], options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
