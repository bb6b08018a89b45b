# SPDX-License-Identifier: Apache-2.0
"""Reasons not to trust a fit, each from what was seen in the data."""

from __future__ import annotations

import numpy as np
from scipy.stats import f as fisher

from scalerl_verl.scaling.fit import solver
from scalerl_verl.scaling.fit.curve import Mask
from scalerl_verl.scaling.fit.late_trend import LateTrend
from scalerl_verl.scaling.fit.points import Points
from scalerl_verl.scaling.fit.result import CurveFit, Trouble

MAX_INTERVAL_WIDTH = 0.1
"""A wider interval of A cannot tell good recipes from bad ones: the paper's ablations span .52 to .71."""
MAX_UNSEEN_RISE = 0.1
"""Of the score with every doubling of compute: as much as an interval of A may be wide."""
STEEP = 3.0
"""A larger B goes from a tenth of the rise to nine tenths within 4.3 times the compute; the paper's are 1.1 to 2.4."""
NEAR_C_MID = 1.25
"""A window that ends below this multiple of C_mid has not seen the curve bend."""
FEW_POINTS = 4  # beyond the parameters
A_EDGE = 0.0025
EARLY_SHARE = 0.15  # of the last compute: the early regime of the paper is 1.5k of 16k GPU-hours
EARLY_MIN_P = 1e-3
EARLY_MIN_SHIFT = 0.01  # of A: half the paper's tie
DROP_SIGMAS = 4.5
MIN_DROP = 0.01

CODES = {
    "identified": "the data pin A down",
    "too_few_points": "an interval from so few degrees of freedom means little",
    "not_monotone": "the score falls, or rises and falls again: an unstable run",
    "late_rise": "the last points rise beyond the curve: its ceiling is not the run's",
    "step_like": "the rise happens between neighbouring points: B and C_mid are not identified",
    "non_saturating": "no sign of a ceiling below 1 in the window",
    "at_edge": "the best value lies on the edge of the grid or of the bounds",
    "window_ends_near_C_mid": "the window ends near or before C_mid: the ceiling is extrapolated, not seen",
    "plateau_too_short": "a slow rise beyond the curve would not be seen yet",
    "interval_too_wide": "very different ceilings fit about equally well",
    "early_regime": "the first points follow another curve than the rest",
}
"""Every verdict, the gravest first after `identified`."""


def find_troubles(
    fit: CurveFit,
    at_bounds: tuple[str, ...],
    late: tuple[CurveFit, int] | None,
    trend: LateTrend | None,
    unseen: float | None,
    before: Points,
) -> tuple[Trouble, ...]:
    """Everything that speaks against the fit, the gravest first.

    Args:
        fit: without troubles yet.
        at_bounds: sentences about best values on the edge of the grid or of the bounds.
        late: the fit without the first points and their number, if there were enough points to try.
        trend: of the last points, beside the curve, if there is one.
        unseen: rise beyond the curve with every doubling of compute that the data allow, if it was bounded.
        before: all points with compute > 0, those below the warm-up cut too: a score that stays below what the run
            had reached has fallen, wherever the cut lies.
    """
    found = [
        _few_points(fit),
        _not_monotone(fit, trend, before),
        _late_rise(fit, trend),
        _step_like(fit),
        *_edges(fit, at_bounds),
        _window(fit),
        _plateau(fit, unseen),
        _too_wide(fit),
        _early_regime(fit, late),
    ]
    order = list(CODES)
    return tuple(sorted((trouble for trouble in found if trouble), key=lambda trouble: order.index(trouble.code)))


def _few_points(fit: CurveFit) -> Trouble | None:
    if fit.dof >= FEW_POINTS:
        return None
    return Trouble(
        "too_few_points",
        f"{fit.num_observations} points for {fit.num_parameters} parameters; a verdict needs "
        f"{fit.num_parameters + FEW_POINTS} or more: evaluate more often.",
    )


def _not_monotone(fit: CurveFit, trend: LateTrend | None, before: Points) -> Trouble | None:
    first = int(np.searchsorted(before.compute, fit.points.trained.compute[0]))
    fall = find_fall(before, first)
    if fall is not None:
        size, ends = fall[2], before.compute[list(fall[:2])]
    elif trend is not None and trend.slope < 0 and -trend.change > MIN_DROP:
        size, ends = -trend.change, fit.points.compute[[trend.first, -1]]
    else:
        return None
    return Trouble(
        "not_monotone",
        f"the score falls by {size:.3f} between compute {ends[0]:.4g} and {ends[1]:.4g}, more than its noise: an "
        "unstable run has no ceiling; fit the part before the fall or look at the run.",
    )


def _late_rise(fit: CurveFit, trend: LateTrend | None) -> Trouble | None:
    if trend is None or trend.slope < 0 or trend.slope <= MIN_DROP:
        return None
    return Trouble(
        "late_rise",
        f"from compute {fit.points.compute[trend.first]:.4g} on the score rises by {trend.slope:.3f} beyond the curve "
        f"that the earlier points follow: the run has not met the ceiling of {fit.A:.3f}; train longer.",
    )


def find_fall(points: Points, since: int = 0) -> tuple[int, int, float] | None:
    """(index before, index after, size) of the largest fall of the running mean if it is beyond noise, else None.

    It ends at point `since` or later. The noise comes from differences of neighbouring points, which a smooth rise or
    fall hardly touches.
    """
    score, num = points.score, len(points)
    width = max(2, num // 8)
    if num < 2 * width + 1:
        return None
    means = np.convolve(score, np.ones(width) / width, mode="valid")
    peaks = np.maximum.accumulate(means)
    # Windows must not overlap: the mean over i..i+width-1 against the highest that ended before i.
    falls = peaks[:-width] - means[width:]
    falls[: min(max(since - width, 0), len(falls) - 1)] = -np.inf
    end = int(falls.argmax())
    start = int(means[: end + 1].argmax())
    # Second differences cancel a slope; their median is not moved by the fall itself.
    second = np.abs(score[2:] - 2 * score[1:-1] + score[:-2])
    noise = float(np.median(second)) / (0.6745 * np.sqrt(6.0)) if len(second) else 0.0
    size = float(falls[end])
    if size <= max(MIN_DROP, DROP_SIGMAS * noise * np.sqrt(2 / width)):
        return None
    return start + width // 2, end + width + width // 2, size


def _step_like(fit: CurveFit) -> Trouble | None:
    if fit.A <= fit.R0 + A_EDGE:
        return None  # without a rise any B fits, and there is no step
    _, high = solver.make_bounds(fit.points.trained.compute, fit.R0)
    most = float(np.exp(high[solver.LOG_B]))
    if fit.B_interval[1] < 0.99 * most and most * 0.99 > fit.B:
        return None
    return Trouble(
        "step_like",
        f"any B from {fit.B_interval[0]:.3g} upwards fits: the score steps up between neighbouring points near compute "
        f"{fit.C_mid:.4g}, so B and C_mid are not identified; evaluate more often there.",
    )


def _edges(fit: CurveFit, at_bounds: tuple[str, ...]) -> list[Trouble]:
    found = []
    if fit.A >= 1 - A_EDGE and not fit.fixed_A:
        if fit.C_mid * NEAR_C_MID > fit.points.compute[-1]:
            text = (
                f"the best ceiling is {fit.A:.3f}, the largest a pass rate can have, and C_mid = {fit.C_mid:.4g} lies "
                "at or beyond the end of the window: the score still rises without bending."
            )
            found.append(Trouble("non_saturating", text))
        else:
            found.append(
                Trouble("at_edge", f"the best ceiling, {fit.A:.3f}, lies on the edge of what a pass rate can be.")
            )
    elif fit.A_interval[1] >= 1 - A_EDGE:
        text = (
            f"ceilings from {fit.A_interval[0]:.2f} up to 1 fit about equally well: the data show no ceiling; train "
            "longer or evaluate on more problems."
        )
        found.append(Trouble("non_saturating", text))
    found += [Trouble("at_edge", text) for text in at_bounds]
    return found


def _window(fit: CurveFit) -> Trouble | None:
    last = fit.points.compute[-1]
    farthest = max(NEAR_C_MID * fit.C_mid, fit.C_mid_interval[1])
    if last >= farthest:
        return None
    return Trouble(
        "window_ends_near_C_mid",
        f"the window ends at {last:.4g} and C_mid, {fit.C_mid:.4g}, may lie as far as {fit.C_mid_interval[1]:.4g}: "
        f"before about {NEAR_C_MID} C_mid a high ceiling reached slowly and a low one reached soon look alike; "
        "train longer.",
    )


def _plateau(fit: CurveFit, unseen: float | None) -> Trouble | None:
    """A curve that rises steeply says that it ends soon after, too; whether the run does, only its plateau tells."""
    if unseen is None or unseen <= MAX_UNSEEN_RISE or fit.B <= STEEP:
        return None
    return Trouble(
        "plateau_too_short",
        f"after its steep rise the score may go on rising by up to {unseen:.2f} with every doubling of compute, which "
        "the data do not show yet: the plateau is too short or too noisy; train longer or evaluate on more problems.",
    )


def _too_wide(fit: CurveFit) -> Trouble | None:
    low, high = fit.A_interval
    if high - low <= MAX_INTERVAL_WIDTH:
        return None
    return Trouble(
        "interval_too_wide",
        f"ceilings from {low:.2f} to {high:.2f} fit about equally well; train longer or evaluate on more problems.",
    )


def split_early(points: Points, num_parameters: int) -> Mask | None:
    """Mask of the points after the early regime and of the score before training; None if a side has too few."""
    started = points.compute == 0
    late = points.compute >= EARLY_SHARE * points.compute[-1]
    if (~late & ~started).sum() < 2:
        num = int((~started).sum())
        late = np.arange(len(points)) >= int(started.sum()) + max(2, num // 6)
    enough = late.sum() >= max(num_parameters - int(started.sum()) + 3, 8) and np.ptp(points.score[late]) > 0
    return late | started if enough else None


def _early_regime(fit: CurveFit, late: tuple[CurveFit, int] | None) -> Trouble | None:
    """Chow's predictive test: do the first points raise the sum of squares by more than their share?"""
    if late is None:
        return None
    later, num_early = late
    dof = later.dof
    per_point = max(later.sse / dof, 1e-12)
    statistic = max(fit.sse - later.sse, 0.0) / num_early / per_point
    shift = abs(fit.A - later.A)
    if shift < EARLY_MIN_SHIFT or float(fisher.sf(statistic, num_early, dof)) > EARLY_MIN_P:
        return None
    first = later.points.trained.compute[0]
    return Trouble(
        "early_regime",
        f"the {num_early} points below compute {first:.4g} follow another curve: without them A is {later.A:.3f} "
        f"instead of {fit.A:.3f}; leave the early regime out (warm-up cut {first:.4g}).",
    )
