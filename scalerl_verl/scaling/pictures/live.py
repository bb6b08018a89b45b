# SPDX-License-Identifier: Apache-2.0
"""The page of a run that still trains: a file that a browser loads again by itself, so no server is needed."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence

from scalerl_verl.scaling import report
from scalerl_verl.scaling.fit.prediction import predict
from scalerl_verl.scaling.fit.result import CurveFit
from scalerl_verl.scaling.logs.segments import ReadError
from scalerl_verl.scaling.pictures.page import wrap
from scalerl_verl.scaling.pictures.style import may_extrapolate
from scalerl_verl.scaling.plot import draw_svg

RELOAD_S = 30
UNIT = "GPU-hours"


def make_live_page(
    name: str, rows: Sequence[tuple[int, float, float]], fit: CurveFit | None, end: float | None, total_steps: int
) -> str:
    """The page after a validation.

    Args:
        name: of the run. rows: step, GPU-hours and pass rate of every validation, in order.
        fit: over GPU-hours; None while there are too few points.
        end: GPU-hours expected at the last step, if known. total_steps: of the run.
    """
    step, hours, score = rows[-1]
    parts = [
        f"<h1>{html.escape(name)}</h1>",
        f"<p>Step {step:,} of {total_steps:,}: pass rate {score:.3f} at {report.number(hours)} {UNIT}. "
        f"Written {time.strftime('%Y-%m-%d %H:%M:%S')}.</p>",
        f"<p>{html.escape(_forecast(fit, end))}</p>",
    ]
    if fit is not None:
        parts.append(_picture(fit, end))
    table = report.table(
        ["step", UNIT, "pass rate"], [[f"{s:,}", report.number(h), f"{r:.4f}"] for s, h, r in reversed(rows)]
    )
    parts.append(f"<pre>{html.escape(table)}</pre>")
    return wrap("\n".join(parts), name, f'<meta http-equiv="refresh" content="{RELOAD_S}">')


def _forecast(fit: CurveFit | None, end: float | None) -> str:
    if fit is None:
        return "No curve yet: too few validations, or scores that do not move."
    if end is None or not may_extrapolate(fit):
        return fit.explain()
    at_end = predict(fit, [end])
    return (
        f"Expected at the last step: {at_end.score[0]:.3f}, {fit.level:.0%} interval {at_end.low[0]:.3f} to "
        f"{at_end.high[0]:.3f}. {fit.explain()}"
    )


def _picture(fit: CurveFit, end: float | None) -> str:
    last = float(fit.points.compute[-1])
    try:
        return draw_svg({"this run": fit}, UNIT, "curve", max(end or last, 1.05 * last))
    except ReadError as error:
        return f"<p>No picture: {html.escape(str(error))}</p>"
