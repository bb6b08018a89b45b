# SPDX-License-Identifier: Apache-2.0
"""Sums of squares over a grid of all curves: how far intervals reach, and where a search with one value held begins.

The way along the profile from the best fit is short where the data say much. Where they say little it bends, ends on a
bound or breaks off, and a search that only walks on from its last place stays behind the bend. The table sees
everything at once: in every cell of (log B, log C_mid) A and R0 are solved for exactly, bounds included.
"""

from __future__ import annotations

import numpy as np

from scalerl_verl.scaling.fit import solver
from scalerl_verl.scaling.fit.curve import Array, Rows, rise
from scalerl_verl.scaling.fit.solver import LOG_B, LOG_C_MID, R0, A, Problems

NUM_LOG_C_MID = 64
NUM_HELD = 48
"""Values of A and R0, between the best one and the bound, at which cells are tried."""


class ProfileTable:
    """Cells (log B, log C_mid), K of them, of M problems with shared x and weights."""

    def __init__(self, problems: Problems) -> None:
        self.problems = solver.average_neighbours(problems, solver.MAX_POINTS_OF_STARTS)
        low, high = problems.low, problems.high
        num_B = max(int(np.ceil((high[LOG_B] - low[LOG_B]) / solver.GRID_STEP_B)), 8)
        self.values = {
            LOG_B: np.linspace(low[LOG_B], high[LOG_B], num_B),
            LOG_C_MID: np.linspace(low[LOG_C_MID], high[LOG_C_MID], NUM_LOG_C_MID),
        }
        log_B, log_C = (axis.ravel() for axis in np.meshgrid(*self.values.values(), indexing="ij"))
        self.cells = {LOG_B: log_B, LOG_C_MID: log_C}
        g_KN = rise(self.problems.x, log_B[:, None], log_C[:, None])
        h_KN, w, y = 1 - g_KN, self.problems.w, self.problems.y
        self.gg, self.gh, self.hh = (w @ product.T for product in (g_KN**2, g_KN * h_KN, h_KN**2))
        self.yg, self.yh = (w * y) @ g_KN.T, (w * y) @ h_KN.T
        self.yy = (w * y * y).sum(1)[:, None]
        self.top, self.bottom, self.sums = solver.solve_linear(self.problems, g_KN, low[R0] == high[R0])

    def hold(self, row: int, column: int, value: Array, cells: Rows | slice = slice(None)) -> tuple[Array, Array]:
        """Of one problem with A or R0 held at each `value` [V]: sums of squares and the other one, [V, cells]."""
        low, high = self.problems.low, self.problems.high
        tiny, held = 1e-300, value[:, None]
        gg, gh, hh = (part[min(row, len(part) - 1), cells] for part in (self.gg, self.gh, self.hh))
        yg, yh = self.yg[row, cells], self.yh[row, cells]
        if column == A:
            top, bottom = held, np.clip((yh - held * gh) / np.maximum(hh, tiny), low[R0], np.minimum(high[R0], held))
        else:
            top, bottom = np.clip((yg - held * gh) / np.maximum(gg, tiny), np.maximum(low[A], held), high[A]), held
        sums = self.yy[row] - 2 * (top * yg + bottom * yh) + top**2 * gg + 2 * top * bottom * gh + bottom**2 * hh
        return sums, bottom if column == A else top

    def start(self, row: int, column: int, value: float) -> Array:
        """The best theta [4] of the cells with a column of theta held at `value`."""
        if column in (A, R0):
            sums, other = self.hold(row, column, np.array([value]))
            cell = int(sums[0].argmin())
            pair = (value, other[0, cell]) if column == A else (other[0, cell], value)
            return np.array([pair[0], self.cells[LOG_B][cell], self.cells[LOG_C_MID][cell], pair[1]])
        near = np.abs(self.cells[column] - value) < 0.51 * np.diff(self.values[column]).max()
        cell = int(np.where(near, self.sums[row], np.inf).argmin())
        theta = np.array(
            [self.top[row, cell], self.cells[LOG_B][cell], self.cells[LOG_C_MID][cell], self.bottom[row, cell]]
        )
        theta[column] = value
        return theta

    def reach(self, row: int, theta: Array, column: int, side: int, limit: float) -> tuple[Array, float] | None:
        """The farthest theta [4] on one side of a fit that a cell holds within the limit, and its rise.

        None if no cell does: then the data say so much that the way from the fit is short.
        """
        best = float(self.problems.take(np.array([row])).sums(theta[None])[0])
        inside = np.flatnonzero(self.sums[row] <= best + limit)
        if not len(inside):
            return None
        sign = -1.0 if side == 0 else 1.0
        if column in (LOG_B, LOG_C_MID):
            cell = inside[int((sign * self.cells[column][inside]).argmax())]
            found = [self.top[row, cell], *(self.cells[c][cell] for c in (LOG_B, LOG_C_MID)), self.bottom[row, cell]]
            rise_by = float(self.sums[row, cell]) - best
        else:
            bound = (self.problems.low if side == 0 else self.problems.high)[column]
            values = np.linspace(theta[column], bound, NUM_HELD)
            sums, other = self.hold(row, column, values, inside)
            fits = np.flatnonzero(sums.min(1) <= best + limit)
            if not len(fits):
                return None
            held, place = int(fits[-1]), int(sums[fits[-1]].argmin())
            pair = (values[held], other[held, place]) if column == A else (other[held, place], values[held])
            found = [pair[0], *(self.cells[c][inside[place]] for c in (LOG_B, LOG_C_MID)), pair[1]]
            rise_by = float(sums[held, place]) - best
        farther = sign * (found[column] - theta[column]) > 0
        return (np.array(found), max(rise_by, 0.0)) if farther else None
