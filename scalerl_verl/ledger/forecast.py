# SPDX-License-Identifier: Apache-2.0
"""The forecast that is logged beside the validation score during training."""

from __future__ import annotations

from collections.abc import Sequence

from scalerl_verl.ledger.compute import ValidationPoint
from scalerl_verl.scaling.fit.fitting import fit_points
from scalerl_verl.scaling.fit.points import FitRefused, Points
from scalerl_verl.scaling.fit.prediction import predict
from scalerl_verl.scaling.fit.result import CurveFit

PREFIX = "scalerl/forecast/"


def fit_validations(points: Sequence[ValidationPoint]) -> CurveFit | None:
    """The curve over GPU-hours; a validation at step 0 observes R0. None: too few points, or they do not move."""
    trained = [point for point in points if point.totals.steps > 0]
    start = [point for point in points if point.totals.steps == 0][:1]
    seen = [*start, *trained]
    stderr = [point.stderr for point in seen]
    usable = all(value == value for value in stderr)
    try:
        data = Points.make(
            [0.0 for _ in start] + [point.totals.gpu_hours for point in trained],
            [point.pass_rate for point in seen],
            stderr if usable and trained else None,
        )
        return fit_points(data)
    except FitRefused:  # the next validation tries again
        return None


def expect_end(points: Sequence[ValidationPoint], total_steps: int) -> float | None:
    """GPU-hours at the last step, by the average hours per step so far; None before the first step."""
    last = points[-1].totals
    return last.gpu_hours * max(total_steps / last.steps, 1.0) if last.steps > 0 else None


def describe_forecast(points: Sequence[ValidationPoint], total_steps: int, fit: CurveFit | None) -> dict[str, float]:
    """Predict the score at the last step of a run from its validations so far.

    Args:
        points: in order; one at step 0 is an observation of R0. total_steps: planned length of the run.
        fit: `fit_validations` of the points.

    Returns:
        `num_points` and `identified` (0 or 1) always; A and its interval, and the score expected at the end of the run
        with its interval, once there are enough points.
    """
    num_trained = sum(point.totals.steps > 0 for point in points)
    metrics = {f"{PREFIX}num_points": float(num_trained), f"{PREFIX}identified": 0.0}
    end_hours = expect_end(points, total_steps)
    if fit is None or end_hours is None:
        return metrics
    predicted = predict(fit, [end_hours])
    return metrics | {
        f"{PREFIX}identified": float(fit.identified),
        f"{PREFIX}A": fit.A,
        f"{PREFIX}A_low": fit.A_interval[0],
        f"{PREFIX}A_high": fit.A_interval[1],
        f"{PREFIX}end_score": float(predicted.score[0]),
        f"{PREFIX}end_low": float(predicted.low[0]),
        f"{PREFIX}end_high": float(predicted.high[0]),
        f"{PREFIX}end_gpu_hours": end_hours,
    }
