# SPDX-License-Identifier: Apache-2.0
"""The forecast that is logged beside the validation score during training."""

from __future__ import annotations

from collections.abc import Sequence

from scalerl_verl.ledger.compute import ValidationPoint
from scalerl_verl.scaling.fit.fitting import fit_points
from scalerl_verl.scaling.fit.points import FitRefused, Points
from scalerl_verl.scaling.fit.prediction import predict

PREFIX = "scalerl/forecast/"


def forecast_metrics(points: Sequence[ValidationPoint], total_steps: int) -> dict[str, float]:
    """Fit the validations of a run so far over GPU-hours and predict its last step.

    Args:
        points: in order; one at step 0 is an observation of R0. total_steps: planned length of the run.

    Returns:
        `num_points` and `identified` (0 or 1) always; A and its interval, and the score expected at the end of the run
        with its interval, once there are enough points. GPU-hours at the end assume the average hours per step so far.
    """
    trained = [point for point in points if point.totals.steps > 0]
    start = [point for point in points if point.totals.steps == 0][:1]
    metrics = {f"{PREFIX}num_points": float(len(trained)), f"{PREFIX}identified": 0.0}
    seen = [*start, *trained]
    stderr = [point.stderr for point in seen]
    usable = all(value == value for value in stderr)
    try:
        data = Points.make(
            [0.0 for _ in start] + [point.totals.gpu_hours for point in trained],
            [point.pass_rate for point in seen],
            stderr if usable and trained else None,
        )
        fit = fit_points(data)
    except FitRefused:  # too few points yet, or scores that do not move: the next validation tries again
        return metrics
    last = trained[-1].totals
    end_hours = last.gpu_hours * max(total_steps / last.steps, 1.0)
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
