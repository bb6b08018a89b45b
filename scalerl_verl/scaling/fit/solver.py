# SPDX-License-Identifier: Apache-2.0
"""Many bounded weighted least-squares fits of Eq. 1 at once.

A fit, its profile intervals, bootstrap resamples and simulated coverage are all the same small problem many times
over; solved one after the other they would spend their time in Python. `Problems` holds M of them side by side.

Parameters are theta = (A, log B, log C_mid, R0). For a given (B, C_mid) the curve is linear in A and R0: the global
search solves for those exactly in every cell of a coarse grid of (log B, log C_mid), and Levenberg-Marquardt steps,
projected on the bounds, finish from the lowest cells.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalerl_verl.scaling.fit.curve import LOG_ZERO, Array, Mask, Rows, rise

A, LOG_B, LOG_C_MID, R0 = range(4)
"""Columns of theta."""
B_MIN = 0.05
C_MID_MARGIN = 100.0
"""C_mid is searched from min(compute) / margin to max(compute) * margin."""
GRID_STEP_B = 0.35  # of log B; the basin of attraction of a solution is wider than this
NUM_GRID_C_MID = 48
NUM_STARTS = 4
MAX_POINTS_OF_STARTS = 1000
"""The grid of starts is laid over no more points; neighbours are averaged, and the finishing steps see all of them."""
MAX_ITERATIONS = 80
TOLERANCE = 1e-13  # of the sum of squares, relative: half the digits of a parameter


@dataclass(frozen=True)
class Problems:
    """M fits on N points each.

    x: log compute, [1 or M, N], `LOG_ZERO` for the score before training. y: scores, [M, N]. w: weights, [1 or M, N].
    low, high: bounds of theta, [4].
    """

    x: Array
    y: Array
    w: Array
    low: Array
    high: Array

    def take(self, rows: Rows) -> Problems:
        """The problems of the given rows (indices, repeats allowed)."""

        def pick(values: Array) -> Array:
            return values if len(values) == 1 else values[rows]

        return Problems(pick(self.x), self.y[rows], pick(self.w), self.low, self.high)

    def sums(self, theta: Array) -> Array:
        """Weighted sum of squared residuals of theta [M, 4], [M]."""
        return (self.w * (self.y - scores(self, theta)) ** 2).sum(1)


def scores(problems: Problems, theta: Array) -> Array:
    """Scores of the curves theta [M, 4] at every point, [M, N]."""
    g = rise(problems.x, theta[:, LOG_B, None], theta[:, LOG_C_MID, None])
    return theta[:, R0, None] + (theta[:, A] - theta[:, R0])[:, None] * g


def jacobian(problems: Problems, theta: Array) -> Array:
    """Gradients of the scores by theta, [M, 4, N]."""
    B = np.exp(theta[:, LOG_B, None])
    z = problems.x - theta[:, LOG_C_MID, None]
    g = rise(problems.x, theta[:, LOG_B, None], theta[:, LOG_C_MID, None])
    slope = (theta[:, A] - theta[:, R0])[:, None] * g * (1 - g) * B
    return np.stack([g, slope * z, -slope, 1 - g], axis=1)


def make_bounds(compute: Array, given_R0: float | None) -> tuple[Array, Array]:
    """Bounds of theta for data at `compute` [N], sorted and positive.

    B may be so large that the curve steps from R0 to A between two neighbouring points; beyond that nothing changes.
    """
    gap = float(np.diff(np.log(compute)).min())
    most = min(max(20.0, 60.0 / gap), 1e5)
    low = np.array([0.0, np.log(B_MIN), np.log(compute[0] / C_MID_MARGIN), 0.0])
    high = np.array([1.0, np.log(most), np.log(compute[-1] * C_MID_MARGIN), 1.0])
    if given_R0 is not None:
        low[[A, R0]], high[R0] = given_R0, given_R0
    return low, high


def find_starts(problems: Problems, fixed_R0: bool) -> Array:
    """Starts for `minimise` from a grid of (log B, log C_mid), [M, NUM_STARTS, 4]; x must be shared by all problems."""
    problems = average_neighbours(problems, MAX_POINTS_OF_STARTS)
    low, high = problems.low, problems.high
    num_B = max(int(np.ceil((high[LOG_B] - low[LOG_B]) / GRID_STEP_B)), 8)
    grid_B = np.linspace(low[LOG_B], high[LOG_B], num_B)
    # Where data lie, the curve changes with C_mid; far outside, hardly.
    grid_C = np.concatenate([[low[LOG_C_MID]], _spread(problems.x[0], NUM_GRID_C_MID), [high[LOG_C_MID]]])
    log_B, log_C = (axis.ravel() for axis in np.meshgrid(grid_B, grid_C, indexing="ij"))
    g_KN = rise(problems.x, log_B[:, None], log_C[:, None])
    best_A, best_R0, sums = solve_linear(problems, g_KN, fixed_R0)
    sums = sums.reshape(len(sums), num_B, len(grid_C))
    local = np.ones(sums.shape, dtype=bool)
    local[:, 1:] &= sums[:, 1:] <= sums[:, :-1]
    local[:, :-1] &= sums[:, :-1] <= sums[:, 1:]
    local[:, :, 1:] &= sums[:, :, 1:] <= sums[:, :, :-1]
    local[:, :, :-1] &= sums[:, :, :-1] <= sums[:, :, 1:]
    ranked = np.where(local, sums, sums + 1e6).reshape(len(sums), -1)
    cells = np.argpartition(ranked, NUM_STARTS, axis=1)[:, :NUM_STARTS]
    rows = np.arange(len(cells))[:, None]
    return np.stack([best_A[rows, cells], log_B[cells], log_C[cells], best_R0[rows, cells]], axis=-1)


def average_neighbours(problems: Problems, most: int) -> Problems:
    """The problems on at most ``most`` points: means over neighbours, weighted; x must be shared and sorted."""
    num = problems.x.shape[1]
    if num <= most:
        return problems
    edges = np.linspace(0, num, most, endpoint=False).astype(int)
    if problems.x[0, 0] == LOG_ZERO:  # has no neighbours
        edges = np.unique([0, 1, *edges[1:]])
    w = np.add.reduceat(problems.w, edges, axis=1)
    y = np.add.reduceat(problems.w * problems.y, edges, axis=1) / np.maximum(w, 1e-300)
    x = np.add.reduceat(problems.x, edges, axis=1) / np.diff([*edges, num])
    return Problems(x, y, w, problems.low, problems.high)


def _spread(x: Array, count: int) -> Array:
    """`count` values of log C_mid over the data and two e-folds around them."""
    positive = x[x > LOG_ZERO]
    return np.linspace(positive.min() - 2.0, positive.max() + 2.0, count)


def solve_linear(problems: Problems, g_KN: Array, fixed_R0: bool) -> tuple[Array, Array, Array]:
    """A, R0 and the sum of squares of every problem in every cell, [M, K] each; R0 and A kept within bounds."""
    w, y, low, high = problems.w, problems.y, problems.low, problems.high
    wy, h_KN = w * y, 1 - g_KN
    yy, yg, gg = (wy * y).sum(1)[:, None], wy @ g_KN.T, w @ (g_KN**2).T
    yh, gh, hh = wy @ h_KN.T, w @ (g_KN * h_KN).T, w @ (h_KN**2).T
    tiny = 1e-300
    if fixed_R0:
        bottom = np.full(yg.shape, low[R0])
    else:
        determinant = np.maximum(gg * hh - gh**2, tiny)
        bottom = np.clip((yh * gg - yg * gh) / determinant, low[R0], high[R0])
    top = np.clip((yg - bottom * gh) / np.maximum(gg, tiny), np.maximum(low[A], bottom), high[A])
    if not fixed_R0:
        bottom = np.clip((yh - top * gh) / np.maximum(hh, tiny), low[R0], np.minimum(high[R0], top))
    sums = yy - 2 * (top * yg + bottom * yh) + top**2 * gg + 2 * top * bottom * gh + bottom**2 * hh
    return top, bottom, np.maximum(sums, 0.0)


def minimise(problems: Problems, theta: Array, free: Mask) -> tuple[Array, Array]:
    """Levenberg-Marquardt with steps projected on the bounds.

    Args:
        problems: M of them.
        theta: starts, [M, 4]; columns that are not free stay as they are.
        free: [M, 4] or [4] bool.

    Returns:
        theta [M, 4] and its sums of squares [M]; never above those of the starts (clipped to the bounds).
    """
    theta = theta.copy()
    free = np.broadcast_to(free, theta.shape)
    theta = np.where(free, np.clip(theta, problems.low, problems.high), theta)
    theta = _order(theta, free)
    sums = problems.sums(theta)
    damping = np.full(len(theta), 1e-3)
    rows = np.arange(len(theta))
    for _ in range(MAX_ITERATIONS):
        part = problems.take(rows)
        here, can_move = theta[rows], free[rows]
        step = _step(part, here, can_move, damping[rows])
        there = np.where(can_move, np.clip(here + step, part.low, part.high), here)
        there = _order(there, can_move)
        new = part.sums(there)
        old = sums[rows]
        better = new <= old
        theta[rows[better]], sums[rows[better]] = there[better], new[better]
        damping[rows] = np.where(better, np.maximum(damping[rows] / 8, 1e-12), damping[rows] * 6)
        still = np.abs(there - here).max(1) < 1e-9
        settled = better & (old - new <= TOLERANCE * old + 1e-18) & (still | (old - new <= 1e-18))
        rows = rows[~(settled | (damping[rows] > 1e9))]
        if not len(rows):
            break
    return theta, sums


def _order(theta: Array, free: Mask) -> Array:
    """Eq. 1 rises: project on A >= R0."""
    gap = theta[:, R0] - theta[:, A]
    if not (gap > 0).any():
        return theta
    theta = theta.copy()
    gap = np.maximum(gap, 0.0)
    both = free[:, A] & free[:, R0]
    theta[:, A] += np.where(both, gap / 2, np.where(free[:, A], gap, 0.0))
    theta[:, R0] -= np.where(both, gap / 2, np.where(free[:, R0], gap, 0.0))
    return theta


def curvature(problems: Problems, theta: Array) -> tuple[Array, Array]:
    """Gauss-Newton matrix J'WJ [M, 4, 4] and J'W(y - f) [M, 4] at theta."""
    gradient = jacobian(problems, theta)
    weighted = gradient * problems.w[:, None, :]
    residual = problems.y - scores(problems, theta)
    return weighted @ gradient.transpose(0, 2, 1), (weighted @ residual[:, :, None])[:, :, 0]


def _step(problems: Problems, theta: Array, free: Mask, damping: Array) -> Array:
    matrix, gradient = curvature(problems, theta)
    # A parameter on its bound that wants to go further out takes no part in the step.
    out = ((theta <= problems.low) & (gradient < 0)) | ((theta >= problems.high) & (gradient > 0))
    moves = free & ~out
    matrix = matrix * (moves[:, :, None] & moves[:, None, :])
    diagonal = np.diagonal(matrix, axis1=1, axis2=2)
    extra = np.where(moves, damping[:, None] * diagonal + 1e-14, 1.0)
    matrix = matrix + extra[:, :, None] * np.eye(4)
    step = np.linalg.solve(matrix, (gradient * moves)[:, :, None])[:, :, 0]
    # No step crosses more than a few e-folds at once: far out the curve is flat and the way back is lost.
    return np.clip(step, [-0.5, -1.5, -3.0, -0.5], [0.5, 1.5, 3.0, 0.5])


def solve(problems: Problems, fixed_R0: bool) -> tuple[Array, Array]:
    """The global fit of every problem: theta [M, 4] and sums of squares [M]."""
    starts = find_starts(problems, fixed_R0)
    num_problems, num_starts, _ = starts.shape
    rows = np.repeat(np.arange(num_problems), num_starts)
    free = np.array([True, True, True, not fixed_R0])
    theta, sums = minimise(problems.take(rows), starts.reshape(-1, 4), free)
    best = sums.reshape(num_problems, num_starts).argmin(1)
    chosen = np.arange(num_problems) * num_starts + best
    return theta[chosen], sums[chosen]
