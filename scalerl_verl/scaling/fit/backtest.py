# SPDX-License-Identifier: Apache-2.0
"""How good were the forecasts? Fit the first part of a run, predict the rest, compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalerl_verl.scaling.fit.fitting import fit_points
from scalerl_verl.scaling.fit.points import FitRefused, Points
from scalerl_verl.scaling.fit.prediction import add_noise, predict
from scalerl_verl.scaling.fit.result import CurveFit
from scalerl_verl.scaling.fit.rivals import HeldOut, Ranking, find_best, rank, try_rivals

SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Forecast:
    """One forecast: fitted to the first `share` of the compute, tested on the rest.

    rmse, mean_error: of the predictions (mean_error > 0: too optimistic). last_error: predicted minus measured at the
    last point. coverage: share of the later points inside the intervals of new points at `level`. fit: None if refused.
    rivals: every form, the sigmoid among them, on the same points.
    """

    share: float
    num_fitted: int
    num_predicted: int
    rmse: float
    mean_error: float
    last_error: float
    coverage: float
    level: float
    fit: CurveFit | None
    refused: str = ""
    rivals: tuple[HeldOut, ...] = ()

    @property
    def best(self) -> HeldOut | None:
        """The form with the smallest error; None if all were refused."""
        return find_best(self.rivals)

    def to_dict(self) -> dict[str, object]:
        """For JSON; NaN (refused) becomes null."""
        numbers = {
            name: None if np.isnan(value) else value
            for name in ("rmse", "mean_error", "last_error", "coverage")
            for value in [getattr(self, name)]
        }
        return {
            "share": self.share,
            "num_fitted": self.num_fitted,
            "num_predicted": self.num_predicted,
            **numbers,
            "level": self.level,
            "verdict": None if self.fit is None else self.fit.verdict,
            "A": None if self.fit is None else self.fit.A,
            "A_interval": None if self.fit is None else list(self.fit.A_interval),
            "refused": self.refused or None,
            "best": None if self.best is None else self.best.form,
            "rivals": [
                {
                    "form": held.form,
                    "rmse": None if held.fit is None else held.rmse,
                    "mean_error": None if held.fit is None else held.mean_error,
                    "refused": held.refused or None,
                }
                for held in self.rivals
            ],
        }


def backtest(
    points: Points,
    *,
    R0: float | None = None,
    shares: Sequence[float] = SHARES,
    level: float = 0.95,
    errors: str = "relative",
) -> tuple[Forecast, ...]:
    """Forecast from every share of the compute.

    Raises:
        ValueError: a share outside (0, 1).
    """
    if not shares or any(not 0 < share < 1 for share in shares):
        raise ValueError(f"shares={list(shares)} must be numbers between 0 and 1, such as 0.25 0.5 0.75")
    return tuple(_forecast(points, R0, share, level, errors) for share in shares)


def rank_forecasts(forecasts: Sequence[Forecast]) -> Ranking | None:
    """Which form would have been best over the shares; None where at no share every form forecast."""
    return rank([(forecast.share, forecast.rivals) for forecast in forecasts])


def _forecast(points: Points, R0: float | None, share: float, level: float, errors: str) -> Forecast:
    early = points.compute <= share * points.compute[-1]
    fitted, later = points.select(early), points.select(~early)
    num_fitted, num_later, nothing = len(fitted.trained), len(later), float("nan")
    try:
        fit = fit_points(fitted, R0=R0, level=level, errors=errors)
    except FitRefused as refusal:
        rivals = tuple(try_rivals(None, str(refusal), fitted, later, R0))
        return Forecast(
            share, num_fitted, num_later, nothing, nothing, nothing, nothing, level, None, str(refusal), rivals
        )
    predicted = predict(fit, later.compute)
    low, high = add_noise(fit, predicted, later.stderr)
    error = predicted.score - later.score
    inside = (later.score >= low) & (later.score <= high)
    return Forecast(
        share,
        num_fitted,
        num_later,
        float(np.sqrt((error**2).mean())),
        float(error.mean()),
        float(error[-1]),
        float(inside.mean()),
        level,
        fit,
        rivals=tuple(try_rivals(fit, "", fitted, later, R0)),
    )
