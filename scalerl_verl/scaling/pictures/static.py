# SPDX-License-Identifier: Apache-2.0
"""Pictures by matplotlib: a run's points, its curve, solid in its window and dashed beyond, its name beside it."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from scalerl_verl.scaling.fit.curve import linear_form
from scalerl_verl.scaling.fit.prediction import band
from scalerl_verl.scaling.fit.result import CurveFit
from scalerl_verl.scaling.logs.segments import ReadError
from scalerl_verl.scaling.pictures.style import (
    Look,
    describe_ceiling,
    describe_slope,
    look_of,
    may_extrapolate,
    short_number,
    spread,
)

SIZE = 9.0, 5.0  # inches
LABEL_GAP = 0.105  # of the height: two lines of text and air
LACKS = re.compile(r"Glyph (\d+) .*missing from ")
KEYS = {
    "curve": "bars: first and last point of a run; dashed: beyond them; shaded: {level:.0%} interval",
    "linear": "bars: first and last point of a run; dashed: beyond them",
}


@contextlib.contextmanager
def watch_letters() -> Iterator[set[str]]:
    """Letters that matplotlib's font lacks, of what is drawn inside the block, in place of its warnings of each."""
    missing: set[str] = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield missing
    for warning in caught:
        found = LACKS.match(str(warning.message))
        if found:
            missing.add(chr(int(found[1])))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def draw(fits: Mapping[str, CurveFit], unit: str, kind: str, until: float, title: str) -> Any:
    """A figure of matplotlib; it belongs to no window.

    Args:
        fits: by name. unit: of the compute. kind: `curve` or `linear`. until: end of the extrapolation.
        title: above the picture; empty for none.

    Raises:
        ReadError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ReadError("drawing needs matplotlib: pip install 'scalerl-verl[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xscale("log")
    if kind == "linear":
        axes.set_yscale("log")
    axes.set_xlabel(unit, fontsize=12, parse_math=False)
    axes.set_ylabel("pass rate" if kind == "curve" else "(R - R0) / (A - R)", fontsize=12)
    draw_one = _draw_curve if kind == "curve" else _draw_linear
    ends = [draw_one(axes, fit, look_of(place), until) for place, fit in enumerate(fits.values())]
    _label_axis(axes.xaxis)
    if kind == "linear":
        _label_axis(axes.yaxis)
    axes.grid(alpha=0.25, which="both", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    describe = describe_ceiling if kind == "curve" else describe_slope
    _label_runs(axes, {name: describe(fit) for name, fit in fits.items()}, ends)
    level = next(iter(fits.values())).level
    figure.supxlabel(KEYS[kind].format(level=level), fontsize=8, color="0.4")
    if title:
        axes.set_title(title, fontsize=13, loc="left", parse_math=False)
    return figure


def _draw_curve(axes: Any, fit: CurveFit, look: Look, until: float) -> tuple[float, float]:
    """Draw a run; returns where its curve ends."""
    points = fit.points.trained  # a logarithmic axis has no zero
    first, last = float(points.compute[0]), float(points.compute[-1])
    axes.errorbar(
        points.compute, points.score, points.stderr, fmt=look.marker, markersize=3.5, color=look.color, alpha=0.45,
        linewidth=0.8, markeredgewidth=0,
    )  # fmt: skip
    end = until if may_extrapolate(fit) else last
    inside = np.geomspace(first, last, 200)
    axes.plot(inside, fit.curve(inside), color=look.color, linewidth=2)
    _mark_ends(axes, (first, last), fit.curve([first, last]), look)
    if end > last:
        beyond = np.geomspace(last, end, 100)
        axes.plot(beyond, fit.curve(beyond), color=look.color, linewidth=1.6, linestyle=(0, (4, 2)))
    if fit.method == "profile":
        shade = band(fit, first, end)
        axes.fill_between(shade.compute, shade.low, shade.high, color=look.color, alpha=0.12, linewidth=0)
    return end, float(fit.curve(end))


def _draw_linear(axes: Any, fit: CurveFit, look: Look, until: float) -> tuple[float, float]:
    points = fit.points.trained
    values = linear_form(points.score, fit.A, fit.R0)
    shown = np.isfinite(values)  # noise can push a score out of (R0, A), where the form has no logarithm
    axes.plot(
        points.compute[shown], values[shown], look.marker, markersize=3.5, color=look.color, alpha=0.45,
        markeredgewidth=0,
    )  # fmt: skip
    ends = np.array([points.compute[0], points.compute[-1]])
    line = (ends / fit.C_mid) ** fit.B
    axes.plot(ends, line, color=look.color, linewidth=2)
    _mark_ends(axes, ends, line, look)
    end = until if may_extrapolate(fit) else float(ends[1])
    height = float((end / fit.C_mid) ** fit.B)
    axes.plot([ends[1], end], [line[1], height], color=look.color, linewidth=1.6, linestyle=(0, (4, 2)))
    return end, height


def _mark_ends(axes: Any, at: Any, heights: Any, look: Look) -> None:
    axes.plot(at, heights, "|", color=look.color, markersize=15, markeredgewidth=2)


def _label_axis(axis: Any) -> None:
    """Label 1, 2 and 5 of every decade, on an axis of more than four only 1; lines at 1, 2 and 5 either way."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    is_short = high < 1e4 * low
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if is_short else (1.0,), numticks=99))
    axis.set_minor_locator(LogLocator(subs=(2.0, 5.0), numticks=99))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    axis.set_minor_formatter(NullFormatter())


def _label_runs(axes: Any, labels: Mapping[str, str], ends: list[tuple[float, float]]) -> None:
    """Write each run's name and what it says to the right of its curve, with a thin line where it had to move."""
    to_share = axes.transData + axes.transAxes.inverted()
    shares = to_share.transform(ends)
    heights = spread(list(shares[:, 1]), LABEL_GAP, LABEL_GAP / 2, 1 - LABEL_GAP / 2)
    for place, (name, text) in enumerate(labels.items()):
        color = look_of(place).color
        axes.annotate(
            f"{name}\n{text}",
            xy=ends[place],
            xycoords="data",
            xytext=(1.03, heights[place]),
            textcoords="axes fraction",
            color=color,
            fontsize=9,
            verticalalignment="center",
            parse_math=False,  # a dollar sign in a name is one
            arrowprops={"arrowstyle": "-", "color": color, "alpha": 0.5, "linewidth": 0.7, "relpos": (0, 0.5)},
        )
