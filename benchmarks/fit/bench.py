# SPDX-License-Identifier: Apache-2.0
"""The default fit with its intervals, and the paper's grid against the literal loop of curve_fit calls, in one process.

python -m benchmarks.fit.bench               200 points, the paper's 71 x 100 grid, as recorded
python -m benchmarks.fit.bench --dry-run --repetitions 5 --literal 1
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.rows import append_rows, run_facts
from scalerl_verl.scaling import fit_curve, sigmoid
from scalerl_verl.scaling.fit.paper_grid import Grid, search, search_literally

TRUTH = {"A": 0.645, "B": 1.70, "C_mid": 8000.0, "R0": 0.30}
NOISE = 0.005
MAX_SECONDS = 0.3
"""The default fit with profile intervals of 200 points must take less."""
MIN_SPEEDUP = 50.0
"""The quick search of the paper's grid against the literal loop."""
DEFAULT, QUICK, LITERAL = (
    "default fit, profile intervals",
    "paper grid, scalerl_verl",
    "paper grid, literal curve_fit loop",
)


def make_points(num: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points of the paper's long run from 1.5k to 50k GPU-hours with normal noise."""
    compute = np.linspace(1500, 50000, num)
    return compute, sigmoid(compute, **TRUTH) + np.random.default_rng(seed).normal(0, NOISE, num)


def verify(compute: np.ndarray, score: np.ndarray) -> dict[str, float]:
    """Sums of squares of the three on the same points: ours must not be above the literal loop's.

    Raises:
        AssertionError: one of ours is worse.
    """
    literal = search_literally(compute, score, TRUTH["R0"]).sse
    quick = search(compute, score, TRUTH["R0"]).sse
    default = fit_curve(compute, score, R0=TRUTH["R0"]).sse
    assert quick <= literal * (1 + 1e-9), f"quick grid {quick} is worse than the literal loop {literal}"
    assert default <= literal, f"default fit {default} is worse than the literal loop {literal}"
    return {DEFAULT: default, QUICK: quick, LITERAL: literal}


def measure(compute: np.ndarray, score: np.ndarray, repetitions: int, literal: int) -> dict[str, list[float]]:
    """Seconds per call; the literal loop, thousands of calls by itself, takes its turn `literal` times."""
    R0 = TRUTH["R0"]
    calls: dict[str, Callable[[], object]] = {
        DEFAULT: lambda: fit_curve(compute, score, R0=R0),
        QUICK: lambda: search(compute, score, R0),
        LITERAL: lambda: search_literally(compute, score, R0),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(repetitions):
        for name, call in calls.items():
            # Spread over the whole run, so that a busy moment meets all of them.
            if name == LITERAL and repetition % max(repetitions // literal, 1) != 0:
                continue
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def make_rows(seconds: dict[str, list[float]], sse: dict[str, float], num: int, facts: dict[str, Any]) -> list[dict]:
    """One row an implementation."""
    grid = Grid()
    rows = []
    for name, values in seconds.items():
        p20, p50, p80 = (round(float(value) * 1e3, 3) for value in np.percentile(values, [20, 50, 80]))
        case = {"points": num, "grid": [len(grid.A), len(grid.C_mid)], "noise": NOISE, **TRUTH, "calls": len(values)}
        rows.append(
            {
                "case": case,
                "impl": name,
                "metric": "time",
                "p20": p20,
                "p50": p50,
                "p80": p80,
                "unit": "ms",
                "peak_gib": None,
                "error": {"sse": sse[name]},
                **facts,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--repetitions", type=int, default=21)
    parser.add_argument("--literal", type=int, default=5, help="turns of the literal loop")
    parser.add_argument("--dry-run", action="store_true", help="print, record nothing")
    arguments = parser.parse_args()
    facts = run_facts(uuid.uuid4().hex[:12])
    facts["load_1min"] = round(os.getloadavg()[0], 2)
    compute, score = make_points(arguments.points)
    sse = verify(compute, score)
    rows = make_rows(measure(compute, score, arguments.repetitions, arguments.literal), sse, arguments.points, facts)
    for row in rows:
        print(
            f"{row['impl']:>36}: p20 {row['p20']} p50 {row['p50']} p80 {row['p80']} ms, SSR {row['error']['sse']:.6g}"
        )
    median = {row["impl"]: row["p50"] for row in rows}
    speedup = median[LITERAL] / median[QUICK]
    print(
        f"default fit {median[DEFAULT] / 1e3:.3f} s (under {MAX_SECONDS} wanted); "
        f"paper's grid {speedup:.0f} times faster"
    )
    if not arguments.dry_run:
        append_rows("fit", rows)
    return int(median[DEFAULT] / 1e3 >= MAX_SECONDS or speedup < MIN_SPEEDUP)


if __name__ == "__main__":
    sys.exit(main())
