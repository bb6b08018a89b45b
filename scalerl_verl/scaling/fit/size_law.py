# SPDX-License-Identifier: Apache-2.0
"""How ceiling and speed depend on size (of the model, or of the batch): power laws through several fits.

    1 - A = e * size^-a        C_mid = c * size^b

A power law of what is missing to 1 keeps the ceiling below 1 for every size (arXiv 2509.25300 finds power laws of the
test loss over model sizes, whose efficiency saturates: do not extrapolate far). Each is a line in logarithms, fitted by
least squares with the variance of each fit.

Shape legend: S sizes (fits).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import norm
from scipy.stats import t as student

from scalerl_verl.scaling.fit.curve import Array
from scalerl_verl.scaling.fit.groups import RUN_SPREAD, RUN_SPREAD_DOF, own_variance
from scalerl_verl.scaling.fit.points import FitRefused
from scalerl_verl.scaling.fit.result import CurveFit, Interval

MIN_SIZES = 3
"""Two points are on a line whatever the truth is."""
LEAST_ERROR = 0.005
"""A ceiling above 1 less this leaves no error to follow."""


@dataclass(frozen=True)
class LogLine:
    """log value = offset + exponent * (log size - centre), with the covariance that the fits leave.

    exponent_interval: at `level`. scale: of the variances that were given, seen in the scatter around the line; it is
    1 where fits scatter as they say. dof: of the t intervals.
    """

    exponent: float
    exponent_interval: Interval
    offset: float
    centre: float
    variances: tuple[float, float]
    scale: float
    dof: int
    level: float

    def at(self, size: float) -> tuple[float, Interval]:
        """The value on the line at a size, and its interval (of the line, not of another run)."""
        shift = math.log(size) - self.centre
        log_value = self.offset + self.exponent * shift
        spread = math.sqrt(self.variances[0] + self.variances[1] * shift**2)
        half = float(student.ppf(0.5 + self.level / 2, self.dof)) * spread
        return math.exp(log_value), (math.exp(log_value - half), math.exp(log_value + half))


@dataclass(frozen=True)
class SizeLaw:
    """Both lines, and what they were fitted to.

    error: of 1 - A. half: of C_mid. sizes: those of the fits that were used. left_out: run -> why its fit was not.
    """

    error: LogLine
    half: LogLine
    sizes: tuple[float, ...]
    left_out: dict[str, str]

    def A_at(self, size: float) -> tuple[float, Interval]:
        """Ceiling at a size, and its interval."""
        error, (low, high) = self.error.at(size)
        return 1 - error, (1 - high, 1 - low)

    def C_mid_at(self, size: float) -> tuple[float, Interval]:
        """Compute half way up at a size, and its interval."""
        return self.half.at(size)

    def is_beyond(self, size: float) -> bool:
        """Whether a size lies outside those that were measured."""
        return not min(self.sizes) <= size <= max(self.sizes)

    def to_dict(self, sizes: Sequence[float] = ()) -> dict[str, Any]:
        """For JSON; with what it says of further sizes."""
        shown = ("exponent", "exponent_interval", "scale")
        predictions = []
        for size in sizes:
            (A, A_interval), (C_mid, C_mid_interval) = self.A_at(size), self.C_mid_at(size)
            predictions.append(
                {
                    "size": size,
                    "A": A,
                    "A_interval": A_interval,
                    "C_mid": C_mid,
                    "C_mid_interval": C_mid_interval,
                    "extrapolated": self.is_beyond(size),
                }
            )
        return {
            "one_minus_A": {name: getattr(self.error, name) for name in shown},
            "C_mid": {name: getattr(self.half, name) for name in shown},
            "sizes": self.sizes,
            "left_out": self.left_out,
            "predictions": predictions,
        }


def fit_size_law(fits: dict[str, CurveFit], sizes: dict[str, float]) -> SizeLaw:
    """Fit both power laws; several runs of one size count each.

    Args:
        fits: of the runs, all in the same unit of compute.
        sizes: of each of them, positive.

    Raises:
        FitRefused: fewer than `MIN_SIZES` different sizes with an identified ceiling.
    """
    left_out = {name: reason for name, fit in fits.items() if (reason := _unusable(fit)) is not None}
    used = {name: fit for name, fit in fits.items() if name not in left_out}
    different = sorted({sizes[name] for name in used})
    if len(different) < MIN_SIZES:
        why = "".join(f"; {name} is left out: {reason}" for name, reason in left_out.items())
        raise FitRefused(
            "too_few_sizes",
            f"a law over sizes needs runs of {MIN_SIZES} sizes or more with an identified ceiling, got "
            f"{len(different)} ({', '.join(f'{size:g}' for size in different) or 'none'}){why}",
        )
    level = next(iter(used.values())).level
    z = float(norm.ppf(0.5 + level / 2))
    x_S = np.log([sizes[name] for name in used])
    A_S = np.array([fit.A for fit in used.values()])
    own_S = np.array([own_variance([fit]) for fit in used.values()])
    error_variance_S = (own_S + RUN_SPREAD**2) / (1 - A_S) ** 2
    C_mid_S = np.array([fit.C_mid for fit in used.values()])
    ends_S2 = np.log([fit.C_mid_interval for fit in used.values()])
    half_variance_S = ((ends_S2[:, 1] - ends_S2[:, 0]) / (2 * z)) ** 2
    return SizeLaw(
        _line(x_S, np.log(1 - A_S), error_variance_S, level),
        _line(x_S, np.log(C_mid_S), half_variance_S, level),
        tuple(sizes[name] for name in used),
        left_out,
    )


def _unusable(fit: CurveFit) -> str | None:
    if not fit.identified:
        return f"A is not identified ({fit.verdict})"
    return f"A={fit.A:.4f} leaves no error to follow" if fit.A > 1 - LEAST_ERROR else None


def _line(x_S: Array, y_S: Array, variance_S: Array, level: float) -> LogLine:
    """Weighted least squares; the scale of the variances is that of the scatter, beside the one expected, 1.

    The expected scale counts `RUN_SPREAD_DOF` degrees of freedom, as in the comparison of groups: three sizes alone say
    little about their scatter.
    """
    weight_S = 1 / variance_S
    total = float(weight_S.sum())
    centre = float((weight_S * x_S).sum() / total)
    shift_S = x_S - centre
    squares = float((weight_S * shift_S**2).sum())
    offset = float((weight_S * y_S).sum() / total)
    exponent = float((weight_S * shift_S * y_S).sum() / squares)
    chi_square = float((weight_S * (y_S - offset - exponent * shift_S) ** 2).sum())
    dof = len(x_S) - 2 + RUN_SPREAD_DOF
    scale = (RUN_SPREAD_DOF + chi_square) / dof
    half = float(student.ppf(0.5 + level / 2, dof)) * math.sqrt(scale / squares)
    variances = (scale / total, scale / squares)
    return LogLine(exponent, (exponent - half, exponent + half), offset, centre, variances, scale, dof, level)
