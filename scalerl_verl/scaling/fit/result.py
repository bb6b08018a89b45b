# SPDX-License-Identifier: Apache-2.0
"""What a fit returns: frozen, holding its data; `scalerl_verl.scaling.report` renders it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from scalerl_verl.scaling.fit.correlation import Correlation
from scalerl_verl.scaling.fit.curve import Array, sigmoid
from scalerl_verl.scaling.fit.paper_grid import GridFit
from scalerl_verl.scaling.fit.points import Points

IDENTIFIED = "identified"
LEFT_ITS_CURVE = ("not_monotone", "late_rise")
"""Troubles after which the curve is not the run's scores: beyond its window, and at the end of it."""
PARAMETERS = ("A", "B", "C_mid", "R0")
_SHOWN = (
    *(*PARAMETERS, *(f"{name}_interval" for name in PARAMETERS)),
    *("level", "verdict", "identified", "sse", "rmse", "num_points", "num_parameters", "method", "R0_source"),
    *("residual_correlation", "widening"),
)
Interval = tuple[float, float]


@dataclass(frozen=True)
class Trouble:
    """One reason not to trust a fit. code: stable name for scripts; text: what was seen and what would help."""

    code: str
    text: str


@dataclass(frozen=True)
class CurveFit:
    """Result of `fit_curve`.

    A, B, C_mid, R0: parameters of Eq. 1; C_mid has the unit of the compute values.
    A_interval, B_interval, C_mid_interval, R0_interval: confidence intervals (low, high) at `level`; R0_interval is
    None if R0 was given. An end at the end of the search range means that the data do not bound the parameter there.
    sse: sum of squared residuals, weighted by 1 / stderr^2 (scaled to a mean of 1) where standard errors were given.
    num_points: number of points with compute > 0. num_observations: the same plus the score before training, if it was
    fitted. rmse: sqrt(sse / num_observations). num_parameters: number of fitted parameters.
    method: `profile` or `paper`.
    troubles: reasons not to trust A, the gravest first; empty if A is identified.
    points: the data. grid: the table of cells of the method `paper`, else None. fixed_A: whether A was given.
    correlation: the correlation of neighbouring residuals; the intervals are widened by it.
    """

    A: float
    B: float
    C_mid: float
    R0: float
    A_interval: Interval
    B_interval: Interval
    C_mid_interval: Interval
    R0_interval: Interval | None
    level: float
    sse: float
    num_points: int
    num_parameters: int
    method: str
    troubles: tuple[Trouble, ...]
    variance: float | None = None
    fixed_A: bool = False
    points: Points = field(repr=False, compare=False, default_factory=lambda: Points(np.zeros(0), np.zeros(0)))
    grid: GridFit | None = field(repr=False, compare=False, default=None)
    correlation: Correlation | None = field(repr=False, compare=False, default=None)

    @property
    def verdict(self) -> str:
        """`identified`, or the code of the gravest trouble."""
        return self.troubles[0].code if self.troubles else IDENTIFIED

    @property
    def identified(self) -> bool:
        """Whether the data determine A: there is no trouble."""
        return not self.troubles

    @property
    def leaves_its_curve(self) -> bool:
        """Whether the score falls, or rises beyond the curve, at the end."""
        return any(trouble.code in LEFT_ITS_CURVE for trouble in self.troubles)

    @property
    def rmse(self) -> float:
        """Root mean square residual."""
        return float(np.sqrt(self.sse / self.num_observations))

    @property
    def noise(self) -> float:
        """Standard deviation of a point of average weight around the curve, from the residuals."""
        return float(np.sqrt(self.sse / self.dof))

    @property
    def num_observations(self) -> int:
        """Number of points, with that at zero compute."""
        return len(self.points)

    @property
    def dof(self) -> int:
        """Degrees of freedom that the residuals have left."""
        return self.num_observations - self.num_parameters

    @property
    def R0_source(self) -> str:
        """`given`, `observed` (there is a point at zero compute) or `fitted` (there is none)."""
        if self.points.start is not None:
            return "observed"
        return "given" if self.R0_interval is None and self.num_parameters + self.fixed_A == 3 else "fitted"

    @property
    def residual_correlation(self) -> float:
        """Correlation of the residuals of neighbouring points, as it was seen; low by chance with few points."""
        return 0.0 if self.correlation is None else self.correlation.lag_1

    @property
    def widening(self) -> float:
        """How many times as wide the interval of A is as one from independent residuals, before bounds cut it."""
        return 1.0 if self.correlation is None else float(self.correlation.widening(np.eye(4)[:1], self.level)[0])

    def explain(self) -> str:
        """One sentence: A with its interval, or why it is not identified."""
        if self.troubles:
            return f"A is not identified: {self.troubles[0].text}"
        low, high = self.A_interval
        return (
            f"A = {self.A:.3f}, {self.level:.0%} interval {low:.3f} to {high:.3f}; the data reach "
            f"{self.points.compute[-1] / self.C_mid:.1f} times C_mid = {self.C_mid:.4g}."
        )

    def curve(self, compute: ArrayLike) -> Array:
        """The fitted scores at `compute`."""
        return sigmoid(compute, self.A, self.B, self.C_mid, self.R0)

    def theta(self) -> Array:
        """(A, log B, log C_mid, R0), as `scalerl_verl.scaling.fit.solver` takes it."""
        return np.array([self.A, np.log(self.B), np.log(self.C_mid), self.R0])

    def to_dict(self) -> dict[str, Any]:
        """Everything but the data, for JSON."""
        return {name: getattr(self, name) for name in _SHOWN} | {
            "troubles": [vars(trouble) for trouble in self.troubles],
            "window": [float(self.points.trained.compute[0]), float(self.points.compute[-1])],
        }
