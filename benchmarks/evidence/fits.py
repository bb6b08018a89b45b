# SPDX-License-Identifier: Apache-2.0
"""Fits of the miniature's recorded curves: the mean over seeds, and what drawing the seeds anew does to its ceiling.

python -m benchmarks.evidence.fits    draw docs/evidence*.png anew
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.evidence.compare import LATE, LEVEL
from benchmarks.markdown import table
from benchmarks.miniature.runs import KEPT, LABELS, MANY, REFERENCE, Group, Points, points_of, read_group
from benchmarks.rows import REPO
from scalerl_verl.scaling import FitRefused, fit_curve
from scalerl_verl.scaling.fit import solver
from scalerl_verl.scaling.fit.backtest import backtest
from scalerl_verl.scaling.fit.fitting import pose
from scalerl_verl.scaling.fit.result import CurveFit
from scalerl_verl.scaling.fit.solver import Problems
from scalerl_verl.scaling.plot import write_plot

LARGER = Group("3M", problems=MANY)
PICTURES = {REPO / "docs" / "evidence.png": Group(), REPO / "docs" / "evidence-3M.png": LARGER}
DRAWN = ("scalerl", KEPT, "grpo", "dapo", "gspo")
RESAMPLES, RESAMPLING_SEED = 1000, 0
Array = NDArray[Any]


def stack(runs: Mapping[int, Points]) -> tuple[Array, Array, Array]:
    """Tokens, pass rates and standard errors [seeds, points] at the optimizer steps that all seeds have."""
    steps = sorted(set.intersection(*(set(points["updates"]) for points in runs.values())))
    columns = []
    for name in ("tokens", "pass_rate", "stderr"):
        rows = [dict(zip(points["updates"], points[name], strict=True)) for points in runs.values()]
        columns.append(np.array([[row[step] for step in steps] for row in rows], dtype=float))
    return columns[0], columns[1], columns[2]


def average(stacked: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """Means over seeds, and the standard errors of the means of pass rates, [points]."""
    tokens, scores, errors = stacked
    return tokens.mean(0), scores.mean(0), np.sqrt(np.square(errors).sum(0)) / len(errors)


def fit_mean(runs: Mapping[int, Points]) -> CurveFit:
    """Fit of the mean over seeds; R0 is what was measured before training.

    Raises:
        FitRefused: the means hold no curve.
    """
    tokens, scores, errors = average(stack(runs))
    used = tokens > 0
    return fit_curve(tokens[used], scores[used], errors[used], R0=float(scores[0]))


def resampled_ceilings(runs: Mapping[int, Points], num: int = RESAMPLES, seed: int = RESAMPLING_SEED) -> Array:
    """A of the fits of means over seeds drawn with replacement, [num].

    All fits are solved together, from where a search over the fit of the seeds themselves would start, and from that.
    """
    tokens, scores, errors = stack(runs)
    drawn = np.random.default_rng(seed).integers(0, len(runs), (num, len(runs)))
    used = tokens.mean(0) > 0
    x = np.log(tokens[drawn].mean(1)[:, used])
    y = scores[drawn].mean(1)
    variance = np.square(errors[drawn]).mean(1)[:, used]
    weights = 1 / variance
    fit = fit_mean(runs)
    base = pose(fit.points, None)  # A is bounded by each resample's own R0, below
    problems = Problems(x, y[:, used], weights / weights.mean(1, keepdims=True), base.low, base.high)
    starts = np.concatenate([solver.find_starts(pose(fit.points, fit.R0), True)[0], fit.theta()[None]])
    free = np.array([True, True, True, False])
    best_A, best = np.zeros(num), np.full(num, np.inf)
    for start in starts:
        theta = np.repeat(start[None], num, axis=0)
        theta[:, solver.R0] = y[:, 0]
        theta, sums = solver.minimise(problems, theta, free)
        better = sums < best
        best_A[better], best[better] = theta[better, solver.A], sums[better]
    return best_A


def seeds_interval(runs: Mapping[int, Points]) -> tuple[float, float]:
    """Percentile interval of the ceiling over `resampled_ceilings`."""
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(resampled_ceilings(runs), [tail, 100 - tail])
    return float(low), float(high)


def fits_table(group: Group | None = None) -> str:
    """One line a recipe: the fit of the mean over seeds, and its half-budget forecast against what happened."""
    runs = points_of(read_group(group or Group()))
    lines = []
    for name, found in runs.items():
        tokens, scores, _ = average(stack(found))
        if tokens[-1] < LATE:
            continue
        lines.append((LABELS[name], f"{tokens[-1]:.2g}", *_fit_cells(found, float(scores[0]))))
    ends = ("end, forecast from half", "was")
    return table(
        ("recipe", "tokens", "A", "95% interval", "95% over seeds", "B", "C_mid, tokens", "verdict", *ends), lines
    )


def _fit_cells(runs: Mapping[int, Points], R0: float) -> list[str]:
    try:
        fit = fit_mean(runs)
    except FitRefused as error:
        return [error.code, "", "", "", "", "refused", "", ""]
    forecast = backtest(fit.points, R0=R0, shares=(0.5,))[0]
    end = float(fit.points.score[-1])
    expected = "refused" if forecast.fit is None else f"{end + forecast.last_error:.3f}, {forecast.fit.verdict}"
    intervals = [f"{ends[0]:.3f} to {ends[1]:.3f}" for ends in (fit.A_interval, seeds_interval(runs))]
    numbers = [f"{fit.A:.3f}", *intervals, f"{fit.B:.2f}", f"{fit.C_mid:,.0f}"]
    return [*numbers, fit.verdict, expected, f"{end:.3f}"]


def draw_all() -> None:
    """The pictures of docs/evidence.md."""
    for path, group in PICTURES.items():
        draw(path, group)


def draw(path: Path, group: Group) -> None:
    """Fitted curves of a group: ScaleRL, ScaleRL without no-positive-resampling where it was run, the baselines."""
    runs = points_of(read_group(group))
    labels = LABELS | {KEPT: "ScaleRL, all problems kept"}
    fits = {labels[name]: fit_mean(runs[name]) for name in DRAWN if name in runs}
    title = (
        f"{group.size} parameters, {group.problems:,} problems, k = {group.k}, mean over {len(runs[REFERENCE])} seeds"
    )
    write_plot(fits, path, "sampled tokens", title=title)


if __name__ == "__main__":
    draw_all()
