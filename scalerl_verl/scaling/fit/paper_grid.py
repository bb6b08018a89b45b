# SPDX-License-Identifier: Apache-2.0
"""The paper's own fit (arXiv 2510.13786, section 2.2 and its appendix): a grid of A and C_mid, B by SciPy in each cell.

`search_literally` is that loop as it stands: the truth for tests and the rival of the benchmark. `search` finds the
same cell without 7,100 calls: for a given (B, C_mid) the sum of squares is a parabola in A, so one table over
(C_mid, B) serves all values of A, and only the most promising cells are finished by Newton steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import OptimizeWarning, curve_fit

from scalerl_verl.scaling.fit import solver
from scalerl_verl.scaling.fit.curve import Array, rise, sigmoid
from scalerl_verl.scaling.fit.solver import Problems

PAPER_C_MID = (100.0, 40000.0, 100)
NUM_FINISHED = 48
"""Cells that Newton steps finish; the parabola through the table is exact enough to put the best one among them."""
MAX_VALUES, MAX_CELLS = 10_000, 250_000
"""Of A and of C_mid, and of pairs of them: seconds and 100 MB. The finest grid of the paper has 14,000 pairs."""
ENTRIES_AT_ONCE = 10_000_000
"""Of curves times points in the table: bounds its memory to 80 MB for any number of either."""


@dataclass(frozen=True)
class Grid:
    """Values of A and C_mid to try, ascending; the default is the paper's (C_mid in GPU-hours).

    The C_mid values in the paper's tables lie on `linspace(100, 4000, 100)` and `linspace(4000, 40000, 100)`, not on
    one linear grid up to 40,000: give the union to land on them.
    """

    A: Array = field(default_factory=lambda: np.round(np.arange(0.450, 0.8001, 0.005), 3))
    C_mid: Array = field(default_factory=lambda: np.linspace(*PAPER_C_MID[:2], PAPER_C_MID[2]))

    def __post_init__(self) -> None:
        for name in ("A", "C_mid"):
            values = np.asarray(getattr(self, name), dtype=np.float64)
            if values.ndim != 1 or len(values) < 2 or np.any(np.diff(values) <= 0) or values[0] <= 0:
                raise ValueError(
                    f"the grid of {name} must be two or more positive, ascending values, got {values.tolist()[:5]}..."
                )
            object.__setattr__(self, name, values)
        if len(self.A) * len(self.C_mid) > MAX_CELLS:
            raise ValueError(
                f"the grid has {len(self.A):,} values of A and {len(self.C_mid):,} of C_mid: give a coarser one, of at "
                f"most {MAX_CELLS:,} pairs"
            )
        if self.A[-1] > 1:
            raise ValueError(f"the grid of A ends at {self.A[-1]:g}; a pass rate has a ceiling of at most 1")


@dataclass(frozen=True)
class GridFit:
    """The best cell: its parameters, sum of squares, and a table [A, C_mid] of the least sum of squares and its B.

    `sums_AC` and `B_AC` are NaN where no B > 0 fits (`search_literally`) or A <= R0.
    """

    A: float
    B: float
    C_mid: float
    R0: float
    sse: float
    sums_AC: Array
    B_AC: Array


def search_literally(compute: Array, score: Array, R0: float, grid: Grid | None = None) -> GridFit:
    """One `scipy.optimize.curve_fit` of B per cell from its default start, keeping the least sum of squares."""
    grid = grid or Grid()
    sums_AC = np.full((len(grid.A), len(grid.C_mid)), np.nan)
    B_AC = np.full_like(sums_AC, np.nan)
    for i, A in enumerate(grid.A):
        if A <= R0:
            continue
        for j, C_mid in enumerate(grid.C_mid):
            curve = _make_curve(A, C_mid, R0)
            try:
                with warnings.catch_warnings(), np.errstate(all="ignore"):
                    warnings.simplefilter("ignore", OptimizeWarning)
                    (B,), _ = curve_fit(curve, compute, score)
            except RuntimeError:  # no convergence: the cell is left out, as a script would
                continue
            if B > 0:  # Eq. 1 asks for it
                with np.errstate(all="ignore"):
                    sums_AC[i, j] = ((curve(compute, B) - score) ** 2).sum()
                B_AC[i, j] = B
    if np.isnan(sums_AC).all():
        raise ValueError(
            f"no cell of the grid fits: every A is at or below R0={R0:g}, or no B converged; give a grid of A above "
            "R0, or use method='profile'"
        )
    a, c = np.unravel_index(np.nanargmin(sums_AC), sums_AC.shape)
    return GridFit(grid.A[a], B_AC[a, c], grid.C_mid[c], R0, float(sums_AC[a, c]), sums_AC, B_AC)


def _make_curve(A: float, C_mid: float, R0: float) -> Callable[[Array, float], Array]:
    def curve(c: Array, B: float) -> Array:
        return R0 + (A - R0) / (1 + (C_mid / c) ** B)

    return curve


def search(compute: Array, score: Array, R0: float | None, grid: Grid | None = None) -> GridFit:
    """The cell with the least sum of squares over all B > 0; with R0=None it is fitted together with B.

    Args:
        compute, score: [N], sorted. R0: score at zero compute or None.
        grid: values to try.

    Raises:
        ValueError: every A of the grid is at or below R0.
    """
    grid = grid or Grid()
    values_A = grid.A if R0 is None else grid.A[grid.A > R0]
    if not len(values_A):
        raise ValueError(
            f"every A of the grid, {grid.A[0]:g} to {grid.A[-1]:g}, is at or below R0={R0:g}: give larger ones"
        )
    low, high = solver.make_bounds(compute, R0)
    low[solver.LOG_B] = np.log(1e-3)
    log_C = np.log(grid.C_mid)
    low[solver.LOG_C_MID], high[solver.LOG_C_MID] = log_C[0] - 1, log_C[-1] + 1
    log_B = _spread_B(low[solver.LOG_B], high[solver.LOG_B])
    problems = Problems(np.log(compute)[None], score[None], np.ones((1, len(score))), low, high)
    table = _tabulate(problems, values_A, log_C, log_B, R0)  # [A, C_mid, B]
    sums_AC, log_B_AC = _parabola(table, log_B)
    num = min(NUM_FINISHED, sums_AC.size)
    cells = np.argpartition(sums_AC, num - 1, axis=None)[:num]
    i, j = np.unravel_index(cells, sums_AC.shape)
    start = np.stack(
        [values_A[i], log_B_AC[i, j], log_C[j], _bottom(problems, values_A[i], log_B_AC[i, j], log_C[j], R0)]
    )
    rows = np.zeros(len(cells), dtype=int)
    theta, sums = solver.minimise(problems.take(rows), start.T, np.array([False, True, False, R0 is None]))
    sums_AC[i, j], log_B_AC[i, j] = sums, theta[:, solver.LOG_B]
    best = int(sums.argmin())
    skipped = len(grid.A) - len(values_A)
    padding = np.full((skipped, len(log_C)), np.nan)
    A, b, _, bottom = theta[best]
    return GridFit(
        float(A),
        float(np.exp(b)),
        float(grid.C_mid[j[best]]),
        float(bottom),
        float(sums[best]),
        np.concatenate([padding, sums_AC]),
        np.concatenate([padding, np.exp(log_B_AC)]),
    )


def _spread_B(low: float, high: float) -> Array:
    """Values of log B for the table: dense where curves of practice lie, sparse towards a step."""
    dense = np.linspace(np.log(0.05), np.log(20.0), 26)
    beyond = np.arange(np.log(20.0) + 0.6, high + 0.6, 0.6)
    return np.concatenate([[low], dense, beyond])


def _tabulate(problems: Problems, values_A: Array, log_C: Array, log_B: Array, R0: float | None) -> Array:
    """Sum of squares of every (A, C_mid, B), R0 solved for where it is free."""
    y, a = problems.y[0], values_A[:, None]
    num_cells = len(log_C) * len(log_B)
    g, gg, yg = np.zeros(num_cells), np.zeros(num_cells), np.zeros(num_cells)
    points_at_once = max(ENTRIES_AT_ONCE // num_cells, 1)
    for first in range(0, len(y), points_at_once):
        part = slice(first, first + points_at_once)
        g_KN = rise(problems.x[:, part], np.tile(log_B, len(log_C))[:, None], np.repeat(log_C, len(log_B))[:, None])
        g += g_KN.sum(1)
        gg += np.einsum("kn,kn->k", g_KN, g_KN)
        yg += g_KN @ y[part]
    if R0 is not None:
        sums = (a - R0) * ((a - R0) * gg - 2 * (yg - R0 * g))
        return (((y - R0) ** 2).sum() + sums).reshape(len(values_A), len(log_C), len(log_B))
    yh, gh, hh = y.sum() - yg, g - gg, len(y) - 2 * g + gg  # h = 1 - g
    bottom = np.clip((yh - a * gh) / np.maximum(hh, 1e-300), 0.0, a)
    sums = y @ y - 2 * (a * yg + bottom * yh) + a**2 * gg + 2 * a * bottom * gh + bottom**2 * hh
    return sums.reshape(len(values_A), len(log_C), len(log_B))


def _parabola(table: Array, log_B: Array) -> tuple[Array, Array]:
    """Least value over the last axis and where it is, by the parabola through the least entry and its neighbours."""
    k = np.clip(table.argmin(-1), 1, len(log_B) - 2)
    left, middle, right = (np.take_along_axis(table, (k + d)[..., None], -1)[..., 0] for d in (-1, 0, 1))
    to_left, to_right = log_B[k] - log_B[k - 1], log_B[k + 1] - log_B[k]
    rise_left, rise_right = (left - middle) / to_left, (right - middle) / to_right
    bend = (rise_left + rise_right) / (to_left + to_right)
    slope = rise_right - bend * to_right
    with np.errstate(divide="ignore", invalid="ignore"):
        shift = np.where(bend > 0, -slope / (2 * bend), 0.0)
    shift = np.clip(shift, -to_left, to_right)
    return np.maximum(middle + shift * (slope + shift * bend), 0.0), log_B[k] + shift


def _bottom(problems: Problems, A: Array, log_B: Array, log_C: Array, R0: float | None) -> Array:
    if R0 is not None:
        return np.full(len(A), R0)
    g = rise(problems.x, log_B[:, None], log_C[:, None])
    h = 1 - g
    return np.clip(((problems.y - A[:, None] * g) * h).sum(1) / np.maximum((h**2).sum(1), 1e-300), 0.0, A)


def sum_squares(compute: Array, score: Array, weights: Array, A: float, B: float, C_mid: float, R0: float) -> float:
    """Weighted sum of squared residuals of Eq. 1."""
    return float((weights * (score - sigmoid(compute, A, B, C_mid, R0)) ** 2).sum())
