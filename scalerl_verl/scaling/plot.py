# SPDX-License-Identifier: Apache-2.0
"""Pictures like the paper's: points, fit, dashed extrapolation, interval band, shaded fit window, log compute."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scalerl_verl.scaling import report
from scalerl_verl.scaling.fit.curve import linear_form
from scalerl_verl.scaling.fit.prediction import band
from scalerl_verl.scaling.fit.result import CurveFit
from scalerl_verl.scaling.logs.segments import ReadError

SUFFIXES = (".png", ".svg", ".html")
KINDS = ("curve", "linear")
EXTRAPOLATE = 4.0


def write_plot(
    fits: Mapping[str, CurveFit],
    path: Path,
    unit: str,
    *,
    kind: str = "curve",
    until: float | None = None,
    title: str = "",
) -> None:
    """Draw fits into a file; its suffix chooses PNG, SVG or a self-contained HTML page with the table of fits.

    Args:
        fits: by name. unit: of the compute, for the axis.
        kind: `curve`: score against compute; `linear`: F(R) = (C / C_mid)^B, log-log.
        until: extrapolate up to this compute; None: 4 times the data.

    Raises:
        ReadError: matplotlib is missing, or a file name or bound that means nothing.
    """
    if path.suffix not in SUFFIXES:
        raise ReadError(f"{path}: the file name must end in {', '.join(SUFFIXES)}")
    if kind not in KINDS:
        raise ReadError(f"kind={kind!r}: use one of {', '.join(KINDS)}")
    last = max(float(fit.points.compute[-1]) for fit in fits.values())
    if until is not None and until <= last:
        raise ReadError(f"--until {until:g} must lie beyond the last point, {last:g}")
    figure = _draw(fits, unit, kind, until or last * EXTRAPOLATE, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".html":
        picture = io.StringIO()
        figure.savefig(picture, format="svg")
        path.write_text(_page(picture.getvalue(), fits, unit, title), encoding="utf-8")
    else:
        figure.savefig(path, dpi=150)


def _draw(fits: Mapping[str, CurveFit], unit: str, kind: str, until: float, title: str) -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ReadError("drawing needs matplotlib: pip install 'scalerl-verl[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, fit) in enumerate(fits.items()):
        draw = _draw_curve if kind == "curve" else _draw_linear
        draw(axes, name, fit, f"C{place % 10}", until)
    shown = [fit.points.trained.compute for fit in fits.values()]
    window = [min(compute[0] for compute in shown), max(compute[-1] for compute in shown)]
    axes.axvspan(*window, color="0.5", alpha=0.08, zorder=0, label="fit window")
    axes.set_xscale("log")
    axes.set_xlabel(unit, fontsize=12)
    if kind == "linear":
        axes.set_yscale("log")
        axes.set_ylabel("F(R) = 1 / ((A - R0)/(R - R0) - 1)", fontsize=12)
    else:
        axes.set_ylabel("pass rate", fontsize=12)
    _label_compute(axes)
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="best", fontsize=9)
    axes.set_title(title or ("Compute and pass rate" if kind == "curve" else "Log-log: lines of slope B"), fontsize=14)
    return figure


def _label_compute(axes: Any) -> None:
    """Label 1, 2 and 5 of every decade: matplotlib's labels of a short range run into each other."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_xlim()
    short = high < 200 * low
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if short else (1.0,), numticks=12))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if short:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}" if value < 1e6 else f"{value:.0e}"))


def _draw_curve(axes: Any, name: str, fit: CurveFit, color: str, until: float) -> None:
    points = fit.points.trained  # a logarithmic axis has no zero
    first, last = float(points.compute[0]), float(points.compute[-1])
    axes.errorbar(
        points.compute, points.score, points.stderr, fmt="o", markersize=3.5, color=color, alpha=0.6, linewidth=1
    )
    inside, beyond = np.geomspace(first, last, 200), np.geomspace(last, until, 100)
    low, high = fit.A_interval
    label = f"{name}: A {fit.A:.3f} [{low:.3f}, {high:.3f}], B {fit.B:.2f}, {fit.verdict}"
    axes.plot(inside, fit.curve(inside), color=color, linewidth=2, label=label)
    axes.plot(beyond, fit.curve(beyond), color=color, linewidth=2, linestyle="--")
    if fit.method == "profile":
        shade = band(fit, first, until)
        axes.fill_between(shade.compute, shade.low, shade.high, color=color, alpha=0.15, linewidth=0)


def _draw_linear(axes: Any, name: str, fit: CurveFit, color: str, until: float) -> None:
    points = fit.points.trained  # a logarithmic axis has no zero
    values = linear_form(points.score, fit.A, fit.R0)
    shown = np.isfinite(values)
    axes.plot(points.compute[shown], values[shown], "o", markersize=3.5, color=color, alpha=0.6)
    first, last = float(points.compute[0]), float(points.compute[-1])
    left_out = int((~shown).sum())
    label = f"{name}: slope B = {fit.B:.2f}" + (f" ({left_out} points outside (R0, A) left out)" if left_out else "")
    axes.plot([first, last], (np.array([first, last]) / fit.C_mid) ** fit.B, color=color, linewidth=2, label=label)
    axes.plot([last, until], (np.array([last, until]) / fit.C_mid) ** fit.B, color=color, linewidth=2, linestyle="--")


def _page(svg: str, fits: Mapping[str, CurveFit], unit: str, title: str) -> str:
    picture = svg[svg.index("<svg") :]
    text = html.escape(report.describe_fits(fits, unit))
    heading = html.escape(title or "Compute and pass rate")
    style = (
        "body{font-family:sans-serif;max-width:75em;margin:2em auto}svg{max-width:100%;height:auto}pre{overflow:auto}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{heading}</title>'
        f"<style>{style}</style></head>\n<body><h1>{heading}</h1>\n{picture}\n<pre>{text}</pre></body></html>\n"
    )
