# SPDX-License-Identifier: Apache-2.0
"""How often the default fit's 95% interval holds the true ceiling, and how often `identified` stands over a wrong one.

python -m benchmarks.fit.coverage                         2,000 fits a cell, as recorded
python -m benchmarks.fit.coverage --dry-run --fits 20
"""

from __future__ import annotations

import argparse
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.fit.bench import TRUTH
from benchmarks.rows import append_rows, run_facts
from scalerl_verl.scaling import Points, fit_curve, sigmoid
from scalerl_verl.scaling.fit.correlation import estimate
from scalerl_verl.scaling.fit.curve import Array
from scalerl_verl.scaling.fit.fitting import pose
from scalerl_verl.scaling.fit.profile import find_intervals
from scalerl_verl.scaling.fit.solver import A, Problems, solve

BENCH = "fit_coverage"
NOISE = 0.008
LEVEL = 0.95
FIRST, LAST = 1500.0, 50000.0
"""GPU-hours of the window: up to 6.25 C_mid."""
SIZES = (40, 100)
NOISES = ("independent", "heteroscedastic", "AR(1) .3", "AR(1) .6")
R0_KINDS = ("given", "observed")
LOWEST, HIGHEST, MOST_WRONG = 0.92, 0.98, 0.05
"""What a cell should reach: coverage within the two, `identified` over a wrong interval less often than the third."""


@dataclass(frozen=True)
class Cell:
    """points: with compute > 0. noise: of `NOISES`. R0: of `R0_KINDS`. last: end of the window."""

    points: int
    noise: str
    R0: str
    last: float = LAST

    def draw(self, num: int, rng: np.random.Generator) -> tuple[Points, Array]:
        """Noise-free points, with the score before training if R0 is observed, and the scores of simulated runs.

        The scores are [num, N]; the standard errors of unequal noise are known up to a factor.
        """
        compute = np.concatenate([[0.0], np.linspace(FIRST, self.last, self.points)])
        is_equal = self.noise != "heteroscedastic"
        spread = np.ones(len(compute)) if is_equal else np.linspace(0.5, 1.5, len(compute))
        points = Points(compute, sigmoid(compute, **TRUTH), None if is_equal else spread)
        noise = np.array([wander(len(compute), rho_of(self.noise), rng) for _ in range(num)])
        scores = points.score + NOISE * spread * noise
        return (points.trained, scores[:, 1:]) if self.R0 == "given" else (points, scores)


def rho_of(noise: str) -> float:
    """Correlation of neighbouring points."""
    return float(noise.removeprefix("AR(1) ")) if noise.startswith("AR(1)") else 0.0


def wander(num: int, rho: float, rng: np.random.Generator) -> Array:
    """AR(1) noise of variance 1, [num]."""
    noise = rng.normal(0, 1, num)
    for i in range(1, num):
        noise[i] = rho * noise[i - 1] + np.sqrt(1 - rho**2) * noise[i]
    return noise


def cells() -> Iterator[Cell]:
    """All cells of the study."""
    for points in SIZES:
        for noise in NOISES:
            for R0 in R0_KINDS:
                yield Cell(points, noise, R0)


def measure(cell: Cell, num_fits: int, seed: int) -> dict[str, Any]:
    """Counts over the fits of one cell, which are solved together; those that miss A are fitted alone for a verdict."""
    R0 = TRUTH["R0"] if cell.R0 == "given" else None
    points, scores = cell.draw(num_fits, np.random.default_rng(seed))
    one = pose(points, R0)
    problems = Problems(one.x, scores, one.w, one.low, one.high)
    theta, sums = solve(problems, R0 is not None)
    rows = (problems.take(np.array([row])) for row in range(num_fits))
    num_parameters = 3 + (R0 is None)
    widening = np.array(
        [
            estimate(problem, theta[row], num_parameters, False).widening(np.eye(4), LEVEL)
            for row, problem in enumerate(rows)
        ]
    )
    found = find_intervals(problems, theta, sums, R0 is not None, LEVEL, columns=(A,), widening=widening)
    low, high = found.ends[:, A].T
    missed = np.flatnonzero((low > TRUTH["A"]) | (high < TRUTH["A"]))
    alone = [fit_curve(points.compute, scores[row], points.stderr, R0=R0) for row in missed]
    return {
        "covered": num_fits - len(missed),
        "identified_wrong": sum(fit.identified for fit in alone),
        "width": round(float(np.median(high - low)), 4),
        "widening": round(float(np.median(widening[:, A])), 2),
    }


def make_row(cell: Cell, counts: dict[str, Any], num_fits: int, seed: int, facts: dict[str, Any]) -> dict[str, Any]:
    """One row: the share of fits whose interval holds A; everything counted stands in `error`."""
    share = round(counts["covered"] / num_fits, 4)
    case = {"points": cell.points, "noise": cell.noise, "R0": cell.R0, "last": cell.last, "fits": num_fits}
    return {
        "case": case | {"sigma": NOISE, "seed": seed, "truth": TRUTH},
        "impl": "default fit, profile intervals",
        "metric": "coverage of A",
        "p20": share,
        "p50": share,
        "p80": share,
        "unit": "share of fits",
        "peak_gib": None,
        "error": counts,
        **facts,
    }


def is_reached(row: dict[str, Any]) -> bool:
    """Whether a cell has the coverage that it should have, and few wrong verdicts."""
    return LOWEST <= row["p50"] <= HIGHEST and row["error"]["identified_wrong"] / row["case"]["fits"] < MOST_WRONG


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fits", type=int, default=2000, help="of each cell")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true", help="print, record nothing")
    arguments = parser.parse_args()
    facts = run_facts(uuid.uuid4().hex[:12])
    rows = []
    for place, cell in enumerate(cells()):
        seed = arguments.seed * 1000 + place
        row = make_row(cell, measure(cell, arguments.fits, seed), arguments.fits, seed, facts)
        rows.append(row)
        print(f"{cell}: covered {row['p50']:.3f}, {row['error']}, {'' if is_reached(row) else 'MISSED'}", flush=True)
    if not arguments.dry_run:
        append_rows(BENCH, rows)
    return int(not all(map(is_reached, rows)))


if __name__ == "__main__":
    sys.exit(main())
