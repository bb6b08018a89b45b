# SPDX-License-Identifier: Apache-2.0
"""For honesty: does the sigmoid predict held-out later points better than other curves, and than no curve at all?"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalerl_verl.scaling.fit.forms import FORMS, NAIVE, SIGMOID, RivalFit, fit_form, of_fit
from scalerl_verl.scaling.fit.points import FitRefused, Points
from scalerl_verl.scaling.fit.result import CurveFit

CLEARLY = 0.9
"""A naive forecast is told as better if its error is at most this share of the sigmoid's: ties are no news."""


@dataclass(frozen=True)
class HeldOut:
    """Error of one form on later points: fitted to the first `num_fitted`, tested on the `num_held_out` after them.

    rmse, mean_error: of the predictions (mean_error > 0: predicted too high). fit: None if refused, and why.
    """

    form: str
    num_fitted: int
    num_held_out: int
    rmse: float
    mean_error: float
    fit: RivalFit | None
    refused: str = ""


@dataclass(frozen=True)
class Ranking:
    """Root of the mean square error over all shares at which every form forecast, each share counting as much.

    shares: these. rmse: by form, the best first.
    """

    shares: tuple[float, ...]
    rmse: dict[str, float]

    @property
    def best(self) -> str:
        """The form with the smallest error."""
        return next(iter(self.rmse))

    @property
    def better_naive(self) -> str | None:
        """The best naive forecast if it was clearly better than the sigmoid."""
        naive = next(form for form in self.rmse if form in NAIVE)
        return naive if self.rmse[naive] <= CLEARLY * self.rmse[SIGMOID] else None

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "best": self.best,
            "better_naive": self.better_naive,
            "shares": list(self.shares),
            "rmse": dict(self.rmse),
        }


def compare_held_out(points: Points, R0: float | None, share: float = 0.5) -> tuple[HeldOut, ...]:
    """Fit every form to the points in the first `share` of the compute and test it on the later ones.

    Raises:
        FitRefused: no point is left on one side.
        ValueError: a share outside (0, 1).
    """
    if not 0 < share < 1:
        raise ValueError(f"share={share!r} must lie between 0 and 1")
    early = points.compute <= share * points.compute[-1]
    if early.all() or not early.any():
        raise FitRefused("too_few_points", f"no points on one side of {share:.0%} of the compute.")
    return tuple(try_form(form, points.select(early), points.select(~early), R0) for form in FORMS)


def try_form(form: str, fitted: Points, later: Points, R0: float | None) -> HeldOut:
    """Fit one form to `fitted` and test it on `later`."""
    try:
        return _measure(fit_form(form, fitted, R0), fitted, later)
    except FitRefused as refusal:
        return HeldOut(form, len(fitted.trained), len(later), np.nan, np.nan, None, str(refusal))


def try_rivals(fit: CurveFit | None, refused: str, fitted: Points, later: Points, R0: float | None) -> list[HeldOut]:
    """Every form, with the sigmoid's fit taken as it is; None if it was refused, and why."""
    if fit is None:
        ours = HeldOut(SIGMOID, len(fitted.trained), len(later), np.nan, np.nan, None, refused)
    else:
        ours = _measure(of_fit(fit), fitted, later)
    return [ours, *(try_form(form, fitted, later, R0) for form in FORMS if form != SIGMOID)]


def _measure(fit: RivalFit, fitted: Points, later: Points) -> HeldOut:
    error = fit.curve(later.compute) - later.score
    rmse = float(np.sqrt((error**2).mean()))
    return HeldOut(fit.form, len(fitted.trained), len(later), rmse, float(error.mean()), fit)


def find_best(tested: Sequence[HeldOut]) -> HeldOut | None:
    """The form with the smallest error; None if all were refused."""
    return min((held for held in tested if held.fit is not None), key=lambda held: held.rmse, default=None)


def rank(tested: Sequence[tuple[float, Sequence[HeldOut]]]) -> Ranking | None:
    """Of the forms tested at several shares; None where at no share every form forecast."""
    complete = [(share, forms) for share, forms in tested if all(held.fit is not None for held in forms)]
    if not complete:
        return None
    errors = {
        form: float(np.sqrt(np.mean([held.rmse**2 for _, forms in complete for held in forms if held.form == form])))
        for form in FORMS
    }
    return Ranking(tuple(share for share, _ in complete), dict(sorted(errors.items(), key=lambda item: item[1])))


def rank_past(points: Points, R0: float | None, shares: Sequence[float]) -> Ranking | None:
    """Which form would have been best on the past of a run; None where at no share every form forecast."""
    tested = []
    for share in shares:
        with contextlib.suppress(FitRefused):  # no point on one side: nothing to rank there
            tested.append((share, compare_held_out(points, R0, share)))
    return rank(tested)
