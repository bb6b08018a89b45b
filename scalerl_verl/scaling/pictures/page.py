# SPDX-License-Identifier: Apache-2.0
"""Self-contained HTML pages: a picture with hover by plotly, or any other, above the table of fits."""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from scalerl_verl.scaling import report
from scalerl_verl.scaling.fit.curve import Array
from scalerl_verl.scaling.fit.prediction import band
from scalerl_verl.scaling.fit.result import CurveFit
from scalerl_verl.scaling.pictures.style import Look, describe_ceiling, look_of, may_extrapolate

STYLE = "body{font-family:sans-serif;max-width:75em;margin:2em auto;padding:0 1em}svg{max-width:100%;height:auto}"
STYLE += "pre{overflow:auto}"


def is_plotly_there() -> bool:
    """Whether pages can have hover."""
    try:
        return importlib.util.find_spec("plotly") is not None
    except ValueError:  # it is in sys.modules without a specification
        return False


def make_page(picture: str, fits: Mapping[str, CurveFit], unit: str, title: str) -> str:
    """A page with one heading, a picture (an element) and the table of fits in words."""
    text = html.escape(report.describe_fits(fits, unit))
    return wrap(f"<h1>{html.escape(title)}</h1>\n{picture}\n<pre>{text}</pre>", title)


def wrap(body: str, title: str, head: str = "") -> str:
    """A whole page around a body that is HTML."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{head}<title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>{body}</body></html>\n"
    )


def draw_hover(fits: Mapping[str, CurveFit], unit: str, until: float) -> str:
    """The curves as an element with hover, its script inside."""
    from plotly import graph_objects

    figure = graph_objects.Figure()
    for place, (name, fit) in enumerate(fits.items()):
        for trace in _traces(name, fit, look_of(place), unit, until):
            figure.add_trace(graph_objects.Scatter(**trace))
    figure.update_xaxes(type="log", dtick="D2", title=unit)
    figure.update_yaxes(title="pass rate")
    figure.update_layout(
        template="simple_white", height=560, hovermode="closest", margin={"t": 20}, legend={"tracegroupgap": 4}
    )
    return str(figure.to_html(full_html=False, include_plotlyjs=True, config={"displaylogo": False}))


def _traces(name: str, fit: CurveFit, look: Look, unit: str, until: float) -> list[dict[str, Any]]:
    """Points, curve inside the window, curve beyond it and band of one run; the legend shows and hides all of them."""
    points = fit.points.trained
    first, last = float(points.compute[0]), float(points.compute[-1])
    end = until if may_extrapolate(fit) else last
    both = {"legendgroup": name, "mode": "lines"}
    # Names are text of users, and plotly reads a few HTML tags in them.
    shown = html.escape(name)
    label = f"{shown}<br>{html.escape(describe_ceiling(fit))}"
    hover = f"{shown}<br>%{{x:,.4g}} {html.escape(unit)}: %{{y:.4f}}"
    found: list[dict[str, Any]] = []
    if fit.method == "profile":
        shade = band(fit, first, end)
        found.append(
            both
            | {
                "x": [*shade.compute, *shade.compute[::-1]],
                "y": [*shade.low, *shade.high[::-1]],
                "fill": "toself",
                "fillcolor": _transparent(look.color),
                "line": {"width": 0},
                "hoverinfo": "skip",
                "showlegend": False,
            }
        )
    errors = {} if points.stderr is None else {"error_y": {"array": points.stderr, "thickness": 1, "width": 0}}
    found.append(
        both
        | errors
        | {
            "x": points.compute,
            "y": points.score,
            "mode": "markers",
            "marker": {"color": look.color, "symbol": look.symbol, "size": 6, "opacity": 0.6},
            "hovertemplate": f"{hover}<extra></extra>",
            "showlegend": False,
        }
    )
    for from_, to, dash in ((first, last, "solid"), (last, end, "dash")):
        if to > from_:
            at: Array = np.geomspace(from_, to, 150)
            found.append(
                both
                | {
                    "x": at,
                    "y": fit.curve(at),
                    "name": label,
                    "line": {"color": look.color, "width": 2.5, "dash": dash},
                    "hovertemplate": f"{hover}, by the curve{' beyond the run' * (dash == 'dash')}<extra></extra>",
                    "showlegend": dash == "solid",
                }
            )
    return found


def _transparent(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.13)"
