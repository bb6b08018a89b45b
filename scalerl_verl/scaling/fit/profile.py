# SPDX-License-Identifier: Apache-2.0
"""Profile likelihood intervals: how far a parameter can go while the others make up for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import chi2
from scipy.stats import t as student

from scalerl_verl.scaling.fit import solver
from scalerl_verl.scaling.fit.correlation import RMSE_FLOOR
from scalerl_verl.scaling.fit.curve import Array, Mask, Rows
from scalerl_verl.scaling.fit.profile_table import ProfileTable
from scalerl_verl.scaling.fit.solver import Problems

MAX_EVALUATIONS = 40
ROOT_TOLERANCE = 2e-3  # of the half-width of an interval


@dataclass(frozen=True)
class Intervals:
    """Of M fits: ends [M, 4, 2] in theta, and whether each end is that of the search range, [M, 4, 2].

    theta, sums: the fits themselves, [M, 4] and [M]: better ones than were given, if the search met any.
    """

    ends: Array
    is_open: Array
    theta: Array
    sums: Array


def allowed_excess(sums: Array, num_points: int, num_free: int, level: float, variance: float | None) -> Array:
    """How far the sum of squares may rise above its minimum inside the interval.

    With the variance unknown the limit is that of an exact t interval (squared, the F limit): a chi-square limit is far
    too narrow for a handful of points. With a known variance of a point of weight 1 it is the chi-square limit.
    """
    if variance is not None:
        return np.full_like(sums, variance * float(chi2.ppf(level, 1)))
    dof = num_points - num_free
    quantile = float(student.ppf(0.5 + level / 2, dof))
    return np.maximum(sums, num_points * RMSE_FLOOR**2) * quantile**2 / dof


def find_intervals(
    problems: Problems,
    theta: Array,
    sums: Array,
    fixed_R0: bool,
    level: float = 0.95,
    variance: float | None = None,
    columns: tuple[int, ...] | None = None,
    widening: Array | None = None,
) -> Intervals:
    """Intervals of the free parameters (or the given columns of theta) of every problem.

    Args:
        problems, theta, sums: M fits as `solver.solve` found them.
        fixed_R0: R0 is no parameter.
        level: of confidence. variance: of a point of weight 1, if known.
        columns: restrict the search to these.
        widening: of each interval, [M, 4], against one from independent residuals; None: no widening.
    """
    theta, sums = theta.copy(), sums.copy()
    free = np.array([True, True, True, not fixed_R0])
    num_free = int((free & (problems.high > problems.low)).sum())
    columns = columns or tuple(np.flatnonzero(free))
    widening = np.ones((len(theta), 4)) if widening is None else widening
    table = ProfileTable(problems)
    for _ in range(3):
        limit = allowed_excess(sums, problems.y.shape[1], num_free, level, variance)[:, None] * widening**2
        search = _Search(problems, theta, sums, limit, free, columns, table)
        search.run()
        if not search.improve(theta, sums):
            break
        # The profile went below the minimum: the fit had been a local one. Start again from the better one.
    ends = np.repeat(theta[:, :, None], 2, axis=2)
    is_open = np.zeros(ends.shape, dtype=bool)
    ends[search.row, search.column, search.side] = search.found
    is_open[search.row, search.column, search.side] = search.open
    return Intervals(ends, is_open, theta, sums)


class _Search:
    """The roots of every problem, column and side at once: J of them."""

    def __init__(
        self,
        problems: Problems,
        theta: Array,
        sums: Array,
        limit: Array,
        free: Mask,
        columns: tuple[int, ...],
        table: ProfileTable,
    ) -> None:
        shape = (len(theta), len(columns), 2)
        self.row, place, self.side = (axis.ravel() for axis in np.indices(shape))
        self.column = np.asarray(columns)[place]
        self.problems, self.free = problems, np.broadcast_to(free, (len(self.row), 4)).copy()
        self.free[np.arange(len(self.row)), self.column] = False
        self.best, self.limit, self.table = sums[self.row], limit[self.row, self.column], table
        self.centre = theta[self.row, self.column]
        bound = np.where(self.side == 0, problems.low[self.column], problems.high[self.column])
        # A cannot fall below a fixed R0, nor R0 rise above A's bound: both are bounds of theta already.
        self.bound = bound
        self.warm = theta[self.row].copy()
        self.far = np.zeros(len(self.row), dtype=bool)  # the interval reaches to other cells of the table
        self.found, self.open = self.centre.copy(), np.zeros(len(self.row), dtype=bool)
        self.lowest, self.lowest_theta = self.best.copy(), self.warm.copy()
        self.sign = np.where(self.side == 0, -1.0, 1.0)
        matrix, _ = solver.curvature(problems, theta)
        for m in range(4):
            if not free[m]:
                matrix[:, m, :], matrix[:, :, m] = 0.0, 0.0
                matrix[:, m, m] = 1.0
        matrix = matrix + 1e-12 * np.eye(4)
        spread = np.sqrt(np.maximum(np.diagonal(np.linalg.inv(matrix), axis1=1, axis2=2), 0.0))
        self.first_step = np.clip(np.sqrt(self.limit) * spread[self.row, self.column], 1e-7, 0.5)

    def run(self) -> None:
        """Step outwards, then close in, on the root of the deviance, which is close to linear in the parameter."""
        goal = np.sqrt(self.limit)
        room = np.abs(self.bound - self.centre)
        inner, inner_root = self._reach()
        outer, outer_root = np.full(len(self.row), np.inf), np.full(len(self.row), np.inf)
        at = np.minimum(np.maximum(self.first_step, inner), room)
        active = np.flatnonzero(room > 0)
        self.open[room <= 0] = True
        for _ in range(MAX_EVALUATIONS):
            if not len(active):
                break
            root = self._root(active, at[active])
            inside = root <= goal[active]
            into, outof = active[inside], active[~inside]
            inner[into], inner_root[into] = at[into], root[inside]
            outer[outof], outer_root[outof] = at[outof], root[~inside]
            at_bound = inside & (at[active] >= room[active] - 1e-12)
            self.found[active[at_bound]] = self.bound[active[at_bound]]
            self.open[active[at_bound]] = True
            close = np.abs(root - goal[active]) <= ROOT_TOLERANCE * goal[active]
            narrow = (outer - inner)[active] <= 1e-10
            done = close | narrow
            self.found[active[done]] = (self.centre + self.sign * at)[active[done]]
            active = active[~(at_bound | done)]
            at[active] = self._next(inner, inner_root, outer, outer_root, goal, room)[active]
        if len(active):  # as far as the bracket got; its outer end, to be on the safe side
            last = np.where(np.isfinite(outer), outer, at)
            self.found[active] = (self.centre + self.sign * last)[active]

    @staticmethod
    def _next(inner: Array, inner_root: Array, outer: Array, outer_root: Array, goal: Array, room: Array) -> Array:
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            # Outwards: by the secant from the centre, at least 1.2-fold and at most 4-fold.
            growth = np.clip(1.05 * goal / np.maximum(inner_root, 1e-300), 1.2, 4.0)
            expand = np.minimum(np.maximum(inner, 1e-8) * growth, room)
            share = np.clip((goal - inner_root) / (outer_root - inner_root), 0.08, 0.92)
            between = inner + share * (outer - inner)
        return np.where(np.isfinite(outer), between, expand)

    def _reach(self) -> tuple[Array, Array]:
        """Distances that the table already shows to lie inside, [J], and the roots of the deviance there, [J]."""
        inner, inner_root = np.zeros(len(self.row)), np.zeros(len(self.row))
        for j, (row, column, side) in enumerate(zip(self.row, self.column, self.side, strict=True)):
            found = self.table.reach(row, self.warm[j], column, side, self.limit[j])
            if found is not None:
                theta, rise_by = found
                inner[j], inner_root[j] = abs(theta[column] - self.centre[j]), np.sqrt(rise_by)
                self.warm[j], self.far[j] = theta, True
        return inner, inner_root

    def _root(self, active: Rows, at: Array) -> Array:
        """Square root of the rise of the profile at a distance from the centre."""
        value = self.centre[active] + self.sign[active] * at
        start = self.warm[active].copy()
        start[np.arange(len(active)), self.column[active]] = value
        # R0 <= A: moving one past the other takes it along.
        moved = self.column[active]
        start[:, solver.R0] = np.where(
            moved == solver.A, np.minimum(start[:, solver.R0], start[:, solver.A]), start[:, solver.R0]
        )
        start[:, solver.A] = np.where(
            moved == solver.R0, np.maximum(start[:, solver.R0], start[:, solver.A]), start[:, solver.A]
        )
        theta, sums = solver.minimise(self.problems.take(self.row[active]), start, self.free[active])
        far = np.flatnonzero(self.far[active])
        if len(far):
            # A walk from the best cell of all, too: where the profile bends, one from the last place stays behind.
            there = active[far]
            start = np.array(
                [self.table.start(self.row[j], self.column[j], v) for j, v in zip(there, value[far], strict=True)]
            )
            other, other_sums = solver.minimise(self.problems.take(self.row[there]), start, self.free[there])
            better = other_sums < sums[far]
            theta[far[better]], sums[far[better]] = other[better], other_sums[better]
        within = sums <= self.best[active] + self.limit[active]
        self.warm[active[within]] = theta[within]
        lower = sums < self.lowest[active]
        self.lowest[active[lower]], self.lowest_theta[active[lower]] = sums[lower], theta[lower]
        return np.sqrt(np.maximum(sums - self.best[active], 0.0))

    def improve(self, theta: Array, sums: Array) -> bool:
        """Put better fits that the search met into theta and sums; whether there were any worth a new search."""
        better = self.lowest < self.best - 1e-6 * self.best - 1e-15
        for j in np.flatnonzero(better):
            row = self.row[j]
            if self.lowest[j] < sums[row]:
                free = np.ones(4, dtype=bool)
                free[solver.R0] = self.problems.low[solver.R0] < self.problems.high[solver.R0]
                part = self.problems.take(np.array([row]))
                found, low = solver.minimise(part, self.lowest_theta[j][None], free)
                theta[row], sums[row] = found[0], low[0]
        return bool(better.any())
