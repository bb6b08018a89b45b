# SPDX-License-Identifier: Apache-2.0
"""Text on runs that differ in a setting: laws over sizes, and what a budget favours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scalerl_verl.scaling.fit.advice import Advice
from scalerl_verl.scaling.fit.result import CurveFit
from scalerl_verl.scaling.fit.settings import describe
from scalerl_verl.scaling.fit.size_law import SizeLaw
from scalerl_verl.scaling.report import interval, number, table


def describe_size_law(
    law: SizeLaw, fits: Mapping[str, CurveFit], sizes: Mapping[str, float], name: str, at: Sequence[float], unit: str
) -> str:
    """The runs, both laws, and what they say of further sizes.

    Args:
        law: of these runs.
        fits: of the runs.
        sizes: of the runs.
        name: of the setting.
        at: further sizes.
        unit: of compute.
    """
    used = sorted((run for run in fits if run not in law.left_out), key=lambda run: sizes[run])
    rows = [[run, f"{sizes[run]:g}", f"{fits[run].A:.3f}", number(fits[run].C_mid)] for run in used]
    lines = [table(["run", name, "A", f"C_mid ({unit})"], rows), ""]
    level = f"{law.error.level:.0%}"
    for what, line in (("1 - A", law.error), ("C_mid", law.half)):
        power = f"{line.exponent:+.3f}"
        lines.append(f"{what} ~ {name}^{power}, {level} of the exponent {interval(line.exponent_interval, 3)}")
    if at:
        header = [name, "A", level, f"C_mid ({unit})", level, ""]
        rows = []
        for size in at:
            (A, A_interval), (C_mid, C_mid_interval) = law.A_at(size), law.C_mid_at(size)
            beyond = "extrapolated" if law.is_beyond(size) else ""
            shown = [f"{A:.3f}", interval(A_interval, 3), number(C_mid), interval(C_mid_interval), beyond]
            rows.append([f"{size:g}", *shown])
        lines += ["", table(header, rows)]
    lines += [f"Left out: {run}: {reason}." for run, reason in law.left_out.items()]
    return "\n".join(lines)


def describe_advice(advice: Advice, unit: str) -> str:
    """The best setting at a budget, those that are tied with it, and what the runs do not say."""
    lines = []
    if len(advice.candidates) == 1:
        alone = describe(advice.candidates[0].settings)
        lines.append(
            f"At {number(advice.budget)} {unit}: only {alone} has runs that can be compared there: no comparison."
        )
    elif advice.candidates:
        best = advice.candidates[0]
        lines.append(f"At {number(advice.budget)} {unit}: {describe(best.settings)}")
        rows = []
        for candidate in advice.candidates:
            verdict = "best" if candidate is best else "tied" if candidate.is_tied else "worse"
            shown = [f"{candidate.score:.3f}", interval(candidate.interval, 3), str(len(candidate.runs)), verdict]
            rows.append([describe(candidate.settings), *shown])
        lines.append(table(["setting", "score", "interval", "runs", ""], rows))
        if advice.tied:
            lines.append("Tied: the runs do not tell these settings apart. Take the cheaper one, or run more seeds.")
        for name, end in advice.edges.items():
            further = "larger" if end == "largest" else "smaller"
            value = f"{name}={best.settings[name]:g}"
            lines.append(f"{value} is the {end} that was tried: a {further} one may be better still.")
    else:
        lines.append(f"At {number(advice.budget)} {unit}: no run says anything about this budget.")
    lines += [f"Left out: {run}: {reason}." for run, reason in advice.left_out.items()]
    return "\n".join(lines)


def describe_best_by_budget(found: Sequence[tuple[float, str, bool]], unit: str) -> str:
    """The best setting over the budgets that all runs support."""
    rows = [[number(budget), setting, "tied with another" if tied else ""] for budget, setting, tied in found]
    return "Best by budget, where all runs have points\n" + table([unit, "setting", ""], rows)
