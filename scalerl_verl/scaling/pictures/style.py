# SPDX-License-Identifier: Apache-2.0
"""How a run looks in every kind of picture: colour, marker, words of its verdict, where its curve may be drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scalerl_verl.scaling.fit.result import CurveFit

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, told apart by every kind of colour vision; its yellow is too light for lines."""
MARKERS = (
    ("o", "circle"),
    ("s", "square"),
    ("^", "triangle-up"),
    ("D", "diamond"),
    ("v", "triangle-down"),
    ("P", "cross"),
    ("X", "x"),
)
"""matplotlib's and plotly's names."""
WORDS = {
    "identified": "",
    "too_few_points": "too few points",
    "not_monotone": "the score falls",
    "late_rise": "still rising",
    "step_like": "rises in one step",
    "non_saturating": "no ceiling in sight",
    "at_edge": "at the edge of the search",
    "window_ends_near_C_mid": "window too short",
    "plateau_too_short": "plateau too short",
    "interval_too_wide": "many ceilings fit",
    "early_regime": "the first points differ",
}
"""Every verdict in the words of a label."""


@dataclass(frozen=True)
class Look:
    """color: hexadecimal. marker, symbol: of points, in matplotlib and in plotly."""

    color: str
    marker: str
    symbol: str


def look_of(place: int) -> Look:
    """Of the run at a place in the order given; 49 differ."""
    marker, symbol = MARKERS[(place + place // len(COLORS)) % len(MARKERS)]
    return Look(COLORS[place % len(COLORS)], marker, symbol)


def may_extrapolate(fit: CurveFit) -> bool:
    """Whether the curve says anything beyond the run's window."""
    return not fit.leaves_its_curve


def describe_ceiling(fit: CurveFit) -> str:
    """The second line of a label: the ceiling with its interval, or why there is none."""
    if fit.identified:
        return f"A {fit.A:.3f} [{fit.A_interval[0]:.3f}, {fit.A_interval[1]:.3f}]"
    return f"A unknown: {WORDS[fit.verdict]}"


def describe_slope(fit: CurveFit) -> str:
    """The second line of a label of the log-log picture."""
    return f"slope B {fit.B:.2f} [{fit.B_interval[0]:.2f}, {fit.B_interval[1]:.2f}]"


def short_number(value: float) -> str:
    """A label of an axis: 2,000, 50k, 2M, 5B, 2e+18."""
    if not 1e4 <= abs(value) < 1e12:
        return f"{value:,g}" if abs(value) < 1e12 else f"{value:.0e}"
    power = int(math.log10(abs(value)) + 1e-9) // 3
    return f"{value / 1000**power:g}{' kMB'[power]}"


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near those wanted, in their order, at least `gap` apart and within (low, high) if they fit.

    Places that are too close form a block around the mean of what they want (pool adjacent violators).
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    room = high - low - gap * (len(wanted) - 1)
    if room < 0:
        gap, room = gap + room / max(len(wanted) - 1, 1), 0.0
    blocks: list[list[float]] = []  # of what is wanted less the gaps below: these only have to rise
    for place, i in enumerate(order):
        blocks.append([min(max(wanted[i] - place * gap, low), low + room)])
        while len(blocks) > 1 and _mean(blocks[-2]) > _mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    heights = [_mean(block) for block in blocks for _ in block]
    places = [0.0] * len(wanted)
    for place, i in enumerate(order):
        places[i] = heights[place] + place * gap
    return places


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
