# SPDX-License-Identifier: Apache-2.0
"""Text on rival forecasts: which form would have been best on a run's own past."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scalerl_verl.scaling.fit.backtest import Forecast, rank_forecasts
from scalerl_verl.scaling.fit.forms import FORMS, SIGMOID, fit_form
from scalerl_verl.scaling.fit.prediction import Prediction
from scalerl_verl.scaling.fit.result import CurveFit
from scalerl_verl.scaling.fit.rivals import HeldOut, Ranking
from scalerl_verl.scaling.report import number, table


def describe_rivals(found: Mapping[str, Sequence[Forecast]]) -> str:
    """Errors of every form by share and over all shares, then the best of each run."""
    rows, sentences = [], []
    for name, forecasts in found.items():
        for forecast in forecasts:
            best = "-" if forecast.best is None else _short(forecast.best.form)
            rows.append([name, f"{forecast.share:.0%}", *(_error(held) for held in forecast.rivals), best])
        ranking = rank_forecasts(forecasts)
        if ranking is None:
            sentences.append(f"{name}: at no share every form could forecast; none is called the best over all.")
            continue
        errors = [f"{ranking.rmse[form]:.4f}" for form in FORMS]
        rows.append([name, "all", *errors, _short(ranking.best)])
        sentences.append(f"{name}: {_describe_ranking(ranking)}")
    header = ["run", "fitted", *map(_short, FORMS), "best"]
    return "Errors (rmse) of other forecasts of the same points:\n" + "\n".join([table(header, rows), *sentences])


def _short(form: str) -> str:
    return form.replace("_", " ")


def _error(held: HeldOut) -> str:
    return "-" if held.fit is None else f"{held.rmse:.4f}"


def _describe_ranking(ranking: Ranking) -> str:
    shares = ", ".join(f"{share:.0%}" for share in ranking.shares)
    text = f"best over {shares}: {FORMS[ranking.best]}, off by {ranking.rmse[ranking.best]:.4f}"
    if ranking.best != SIGMOID:
        text += f"; the sigmoid by {ranking.rmse[SIGMOID]:.4f}"
    if ranking.better_naive is not None:
        text += f". '{FORMS[ranking.better_naive]}' needs no curve and was clearly better than the sigmoid"
    return text + "."


def warn_of_past(fit: CurveFit, ranking: Ranking | None, predicted: Prediction | None) -> str:
    """A warning if a naive forecast was clearly better on the run's own past, with what it says now; else nothing."""
    form = None if ranking is None else ranking.better_naive
    if ranking is None or form is None:
        return ""
    shares = ", ".join(f"{share:.0%}" for share in ranking.shares)
    text = (
        f"Warning: on the past of this run '{FORMS[form]}' forecast better than the sigmoid: off by "
        f"{ranking.rmse[form]:.4f}, the sigmoid by {ranking.rmse[SIGMOID]:.4f} (fitted to the first {shares})."
    )
    if predicted is not None:
        at = float(predicted.compute[-1])
        score = float(fit_form(form, fit.points, None).curve(at))
        text += f" At {number(at)} it says {score:.4f}."
    return text
