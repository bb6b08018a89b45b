# SPDX-License-Identifier: Apache-2.0
"""Seeds of one recipe as one curve: the mean ceiling, and the spread between seeds beside the interval within."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import norm
from scipy.stats import t as student

from scalerl_verl.scaling.fit.result import IDENTIFIED, CurveFit, Interval

RUN_SPREAD = 0.0075
"""Standard deviation of A between runs of one recipe that differ in their seeds: half of the 0.015 by which A varied
over three runs of one recipe (arXiv 2510.13786)."""
RUN_SPREAD_DOF = 4
"""What `RUN_SPREAD` counts for beside the spread of given seeds: as three seeds of two recipes do."""


@dataclass(frozen=True)
class GroupFit:
    """Fits of several runs of one recipe that differ in their seeds, as one curve.

    Each seed is fitted by itself; A and R0 are means over seeds, B and C_mid geometric means. A_interval: of the mean,
    from the spread between seeds and what each fit does not know (`mean_ceiling`). spread: standard deviation of A
    between the seeds, None for a single one. within: root mean square of the standard errors of A of the single fits,
    which holds what their points do not know, and nothing of other seeds.
    """

    name: str
    fits: Mapping[str, CurveFit]
    A_interval: Interval

    @classmethod
    def make(cls, name: str, fits: Mapping[str, CurveFit], spread: float = RUN_SPREAD) -> GroupFit:
        """Join fits of one level.

        Raises:
            ValueError: no fit.
        """
        if not fits:
            raise ValueError(f"group {name}: each recipe needs one fit or more")
        level = next(iter(fits.values())).level
        ceilings = [fit.A for fit in fits.values()]
        _, (low, high) = mean_ceiling(ceilings, own_variance(list(fits.values())), level, spread)
        return cls(name, dict(fits), (max(low, 0.0), min(high, 1.0)))

    @property
    def A(self) -> float:
        """Mean ceiling."""
        return float(np.mean([fit.A for fit in self.fits.values()]))

    @property
    def B(self) -> float:
        """Geometric mean of the steepness."""
        return float(np.exp(np.mean([math.log(fit.B) for fit in self.fits.values()])))

    @property
    def C_mid(self) -> float:
        """Geometric mean of the compute half way up."""
        return float(np.exp(np.mean([math.log(fit.C_mid) for fit in self.fits.values()])))

    @property
    def R0(self) -> float:
        """Mean score before training."""
        return float(np.mean([fit.R0 for fit in self.fits.values()]))

    @property
    def level(self) -> float:
        """Of the interval."""
        return next(iter(self.fits.values())).level

    @property
    def spread(self) -> float | None:
        """Standard deviation of A between the seeds."""
        return None if len(self.fits) == 1 else float(np.std([fit.A for fit in self.fits.values()], ddof=1))

    @property
    def within(self) -> float:
        """Standard error of A of one seed, from its points."""
        return math.sqrt(own_variance(list(self.fits.values())))

    @property
    def num_identified(self) -> int:
        """Number of seeds that identify A."""
        return sum(fit.identified for fit in self.fits.values())

    @property
    def identified(self) -> bool:
        """Whether every seed identifies A."""
        return self.num_identified == len(self.fits)

    @property
    def verdict(self) -> str:
        """`identified`, or the verdict of the first seed that is not."""
        return next((fit.verdict for fit in self.fits.values() if not fit.identified), IDENTIFIED)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        shown = ("A", "A_interval", "B", "C_mid", "R0", "level", "spread", "within")
        verdicts = ("verdict", "identified", "num_identified")
        return {"group": self.name, "members": list(self.fits)} | {
            name: getattr(self, name) for name in (*shown, *verdicts)
        }


def own_variance(fits: Sequence[CurveFit]) -> float:
    """Mean square of the standard errors of A, which come from the points of each run."""
    z = float(norm.ppf(0.5 + fits[0].level / 2))
    return float(np.mean([((fit.A_interval[1] - fit.A_interval[0]) / 2 / z) ** 2 for fit in fits]))


def pool(groups: Sequence[Sequence[float]], own: float, spread: float) -> tuple[float, int]:
    """Variance of A between runs of one recipe, and its degrees of freedom.

    That of the seeds given, pooled over the groups, beside the one expected: `spread`^2 and what the fits do not know,
    `own`, which count `RUN_SPREAD_DOF` degrees of freedom (a scaled inverse chi-square prior, so that intervals are t
    intervals). Three seeds alone say little about their spread.
    """
    squares = sum(float(np.sum((np.asarray(A) - np.mean(A)) ** 2)) for A in groups)
    dof = sum(len(A) - 1 for A in groups) + RUN_SPREAD_DOF
    return (RUN_SPREAD_DOF * (spread**2 + own) + squares) / dof, dof


def mean_ceiling(A: Sequence[float], own: float, level: float, spread: float = RUN_SPREAD) -> tuple[float, Interval]:
    """Mean ceiling over seeds and the interval of the recipe's own: that of further seeds, not of these runs alone."""
    variance, dof = pool([A], own, spread)
    half = float(student.ppf(0.5 + level / 2, dof)) * math.sqrt(variance / len(A))
    mean = float(np.mean(A))
    return mean, (mean - half, mean + half)
