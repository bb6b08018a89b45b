# SPDX-License-Identifier: Apache-2.0
"""Text tables of fits, comparisons, predictions and backtests."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence

from scalerl_verl.scaling.fit.backtest import Forecast
from scalerl_verl.scaling.fit.bootstrap import Bootstrap
from scalerl_verl.scaling.fit.compare import RUN_SPREAD, GroupPair, Pair, Row
from scalerl_verl.scaling.fit.forms import FORMS
from scalerl_verl.scaling.fit.prediction import Gain, Prediction, Reach
from scalerl_verl.scaling.fit.result import CurveFit, Interval
from scalerl_verl.scaling.fit.rivals import HeldOut

SHOWN_WIDENING = 1.25
"""Of an interval by correlated residuals; from here on it is told, for it is more than not to know the correlation."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned by spaces: the first to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(_width(line[i]) for line in lines) for i in range(len(header))]

    def render(line: Sequence[str]) -> str:
        gaps = [" " * (width - _width(cell)) for cell, width in zip(line, widths, strict=True)]
        cells = [line[0] + gaps[0], *(gap + cell for gap, cell in zip(gaps[1:], line[1:], strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([render(lines[0]), "  ".join("-" * width for width in widths), *map(render, lines[1:])])


def _width(text: str) -> int:
    """Columns of a terminal: names of runs may hold wide characters and combining ones."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def number(value: float) -> str:
    """Four significant digits, thousands separated; infinity as `never`."""
    if math.isinf(value):
        return "never"
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        text = f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
        return text
    return f"{value:.3g}"


def interval(ends: Interval | None, digits: int | None = None) -> str:
    """`[low, high]`, or a dash."""
    if ends is None:
        return "-"
    if digits is not None:
        return f"[{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]"
    return f"[{number(ends[0])}, {number(ends[1])}]"


def describe_fits(fits: Mapping[str, CurveFit], unit: str) -> str:
    """One line a run, then the explanation of every verdict."""
    level = next(iter(fits.values())).level
    header = [
        "run",
        "A",
        f"{level:.0%} of A",
        "B",
        "of B",
        f"C_mid ({unit})",
        "of C_mid",
        "R0",
        "points",
        "rmse",
        "verdict",
    ]
    rows = [
        [
            name,
            f"{fit.A:.3f}",
            interval(fit.A_interval, 3),
            f"{fit.B:.2f}",
            interval(fit.B_interval, 2),
            number(fit.C_mid),
            interval(fit.C_mid_interval),
            f"{fit.R0:.3f}" + ("*" if fit.R0_source == "fitted" else ""),
            str(fit.num_points),
            f"{fit.rmse:.4f}",
            fit.verdict,
        ]
        for name, fit in fits.items()
    ]
    lines = [table(header, rows)]
    if any("*" in row[7] for row in rows):
        lines.append("* R0 fitted; give the score at zero compute to narrow the intervals.")
    lines.append("")
    for name, fit in fits.items():
        lines.append(f"{name}: {fit.explain()}")
        if fit.widening >= SHOWN_WIDENING:
            lines.append(
                f"{name}: the interval of A is {fit.widening:.1f} times as wide as for independent residuals, because "
                f"the data do not exclude correlated ones (seen between neighbours: {fit.residual_correlation:.2f})."
            )
        lines += [f"{name}: also, {trouble.text}" for trouble in fit.troubles[1:]]
    return "\n".join(lines)


def describe_bootstraps(found: Mapping[str, Sequence[Bootstrap]]) -> str:
    """Bootstrap intervals, a line a run and kind."""
    rows = [
        [
            name,
            b.kind if b.kind == "prompts" else f"points, blocks of {b.block}",
            str(b.num_resamples),
            interval(b.A_interval, 3),
            interval(b.B_interval, 2),
            interval(b.C_mid_interval),
        ]
        for name, bootstraps in found.items()
        for b in bootstraps
    ]
    return table(["run", "bootstrap over", "resamples", "A", "B", "C_mid"], rows)


def describe_held_out(found: Mapping[str, Sequence[HeldOut]], share: float) -> str:
    """Rival forms: fitted to the first part, tested on the rest."""
    rows = [
        [
            name,
            FORMS[h.form],
            str(h.num_fitted),
            str(h.num_held_out),
            "refused" if h.fit is None else "none" if math.isnan(h.fit.A) else f"{h.fit.A:.3f}",
            "-" if h.fit is None else f"{h.rmse:.4f}",
            "-" if h.fit is None else f"{h.mean_error:+.4f}",
        ]
        for name, forms in found.items()
        for h in forms
    ]
    header = ["run", "form", "fitted", "held out", "A", "rmse", "mean error"]
    return f"Fitted to the first {share:.0%} of the compute, tested on the later points:\n" + table(header, rows)


def describe_pairs(pairs: Sequence[Pair], tie: float) -> str:
    """Comparison of every pair by both rules."""
    rows = [
        [
            f"{p.first} - {p.second}",
            f"{p.difference:+.3f}",
            interval(p.difference_interval, 3),
            "tie" if p.tied else "differ",
            "-" if p.common_A is None else f"{p.common_A:.3f}",
            "-" if p.B_first is None or p.B_second is None else f"{p.B_first:.2f} / {p.B_second:.2f}",
            p.paper_winner or "none",
            p.interval_winner or "none",
        ]
        for p in pairs
    ]
    header = [
        "pair",
        "A difference",
        "interval",
        f"within {tie:g}",
        "common A",
        "B there",
        "paper's rule",
        "interval rule",
    ]
    lines = [table(header, rows), ""]
    lines.append(_allowance(pairs))
    lines.append(
        f"Paper's rule: the higher A wins. If they are closer than {tie:g}, the higher B at a common A wins, however "
        "little it is higher. The rule knows no noise, so it mostly names a winner between equal recipes, too."
    )
    by_chance = [f"{p.first} - {p.second}" for p in pairs if p.paper_winner and p.interval_winner is None]
    if by_chance:
        lines.append(f"Not told apart, whatever the paper's rule names: {', '.join(by_chance)}.")
    doubtful = [f"{p.first} - {p.second}" for p in pairs if not p.trusted]
    if doubtful:
        lines.append(f"A is not identified in one or both of: {', '.join(doubtful)}. Do not decide by these lines.")
    return "\n".join(lines)


def _allowance(pairs: Sequence[Pair]) -> str:
    rule = "Interval rule: a winner only if the interval of the difference excludes 0. The interval allows for"
    spreads = [pair.spread for pair in pairs if isinstance(pair, GroupPair)]
    if not spreads:
        return f"{rule} runs of one recipe that differ in A by {RUN_SPREAD:g} (standard deviation)."
    low, high = min(spreads), max(spreads)
    seen = f"{low:.4f}" if len(spreads) == 1 else f"{low:.4f} to {high:.4f}"
    return (
        f"{rule} the spread of A between seeds, pooled over both recipes with the {RUN_SPREAD:g} that is known of "
        f"others: {seen} (standard deviation)."
    )


def describe_leave_one_out(rows: Sequence[Row], reference: str, unit: str) -> str:
    """Every recipe beside the reference."""
    lines = [
        [
            row.name,
            f"{row.fit.A:.3f}",
            "reference" if row.name == reference else f"{row.delta_A:+.3f}",
            f"{row.fit.B:.2f}",
            number(row.fit.C_mid),
            "-" if row.B_common is None else f"{row.B_common:.2f}",
            interval(row.B_common_interval, 2),
            row.fit.verdict,
        ]
        for row in rows
    ]
    header = ["recipe", "A", "against it", "B", f"C_mid ({unit})", "B at common A", "of it", "verdict"]
    return table(header, lines)


def describe_prediction(
    fit: CurveFit, predicted: Prediction | None, reaches: Sequence[Reach], gain: Gain | None, unit: str
) -> str:
    """Predicted scores, compute to reach scores, worth of going on."""
    parts = []
    if predicted is not None:
        rows = [
            [number(c), f"{s:.4f}", f"[{low:.4f}, {high:.4f}]"]
            for c, s, low, high in zip(predicted.compute, predicted.score, predicted.low, predicted.high, strict=True)
        ]
        parts.append(table([unit, "score", f"{predicted.level:.0%} interval"], rows))
    if reaches:
        rows = [[f"{r.score:.3f}", number(r.compute), f"[{number(r.low)}, {number(r.high)}]"] for r in reaches]
        parts.append(table(["score", f"reached at ({unit})", "interval"], rows))
    if gain is not None:
        parts.append(
            f"Going on from {number(gain.start)} to {number(gain.stop)} {unit}: expected gain {gain.gain:+.4f} "
            f"[{gain.low:+.4f}, {gain.high:+.4f}], {gain.per_unit:.3g} per unit; slope now {gain.marginal:.3g} per "
            f"unit; {gain.ceiling_share:.0%} of the way from R0 to A would be reached."
        )
    if not fit.identified:
        parts.append(f"Take this with care: {fit.explain()}")
    return "\n\n".join(parts)


def describe_backtest(found: Mapping[str, Sequence[Forecast]]) -> str:
    """Forecast errors by share of the compute."""
    rows = [
        [
            name,
            f"{f.share:.0%}",
            str(f.num_fitted),
            str(f.num_predicted),
            "-" if f.fit is None else f"{f.fit.A:.3f}",
            "-" if f.fit is None else interval(f.fit.A_interval, 3),
            "-" if f.fit is None else f"{f.rmse:.4f}",
            "-" if f.fit is None else f"{f.last_error:+.4f}",
            "-" if f.fit is None else f"{f.coverage:.0%}",
            "refused" if f.fit is None else f.fit.verdict,
        ]
        for name, forecasts in found.items()
        for f in forecasts
    ]
    header = ["run", "fitted", "points", "predicted", "A", "of A", "rmse", "last error", "coverage", "verdict"]
    refused = [f"{name} {f.share:.0%}: {f.refused}" for name, fs in found.items() for f in fs if f.fit is None]
    return "\n".join([table(header, rows), *refused])
