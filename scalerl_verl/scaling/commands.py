# SPDX-License-Identifier: Apache-2.0
"""`scalerl fit | compare | predict | backtest | plot`; `setting_commands` has `sizes` and `advise`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from scalerl_verl.scaling import group_report, report, rival_report
from scalerl_verl.scaling.answer import Answer
from scalerl_verl.scaling.fit.backtest import SHARES, backtest, rank_forecasts
from scalerl_verl.scaling.fit.bootstrap import Bootstrap, bootstrap
from scalerl_verl.scaling.fit.compare import compare_all, leave_one_out
from scalerl_verl.scaling.fit.groups import GroupFit
from scalerl_verl.scaling.fit.points import FitRefused
from scalerl_verl.scaling.fit.prediction import compute_to_reach, predict, worth_going_on
from scalerl_verl.scaling.fit.result import CurveFit
from scalerl_verl.scaling.fit.rivals import compare_held_out, rank_past
from scalerl_verl.scaling.grouping import choose_groups
from scalerl_verl.scaling.inputs import (
    Inputs,
    check_numbers,
    choose_points,
    choose_R0,
    fit_all,
    need_profile,
    read_inputs,
)
from scalerl_verl.scaling.logs.segments import ReadError
from scalerl_verl.scaling.setting_commands import run_advise, run_sizes

HELD_OUT_SHARE = 0.5


def run_command(options: argparse.Namespace) -> int:
    """Run one of the commands; returns the exit code (see `arguments.EXIT_CODES`)."""
    answer = Answer(options.command)
    try:
        check_numbers(options)
        _COMMANDS[options.command](options, read_inputs(options, answer), answer)
    except FitRefused as refusal:  # of no single run
        answer.refuse("", refusal)
    except ValueError as error:  # of an argument
        answer.error = str(error)
    answer.show(options.json)
    return answer.exit_code


def _fit(options: argparse.Namespace, inputs: Inputs, answer: Answer) -> None:
    fits, _ = _fit_and_tell(options, inputs, answer, choose_groups(options, inputs.places))
    if options.bootstrap:
        need_profile(options, "--bootstrap refits by the default method")
        bootstraps = {name: _bootstrap(options, name, fit) for name, fit in fits.items()}
        for entry in answer.runs:
            entry["bootstrap"] = [item.to_dict() for item in bootstraps[entry["run"]]]
        answer.parts += [report.describe_bootstraps(bootstraps)] if bootstraps else []
    if options.rivals:
        _hold_out(fits, answer)


def _fit_and_tell(
    options: argparse.Namespace, inputs: Inputs, answer: Answer, named: dict[str, list[str]]
) -> tuple[dict[str, CurveFit], dict[str, GroupFit]]:
    """Fits by run, and by group (`choose_groups`) where there are any; a group lacks the runs that were refused."""
    of_run = {run: group for group, runs in named.items() for run in runs}
    fits = fit_all(options, inputs, answer)
    for name, fit in fits.items():
        answer.runs.append(inputs.entry(name) | {"group": of_run.get(name)} | fit.to_dict())
    members = {group: {run: fits[run] for run in runs if run in fits} for group, runs in named.items()}
    groups = {group: GroupFit.make(group, seeds) for group, seeds in members.items() if seeds}
    answer.groups += [group.to_dict() for group in groups.values()]
    answer.parts += [report.describe_fits(fits, inputs.x_label)] if fits else []
    answer.parts += [group_report.describe_groups(groups, inputs.x_label)] if groups else []
    return fits, groups


def _bootstrap(options: argparse.Namespace, name: str, fit: CurveFit) -> list[Bootstrap]:
    found = []
    for kind in ["points"] + (["prompts"] if fit.points.prompt_scores is not None else []):
        with _progress(f"{name}: bootstrap over {kind}", options.bootstrap) as step:
            found.append(bootstrap(fit, kind, options.bootstrap, seed=options.seed, progress=step))
    return found


@contextlib.contextmanager
def _progress(text: str, total: int) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on stderr where rich is installed and a person is looking."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield None
        return
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=total)
        yield lambda done, _: bar.update(task, completed=done)


def _hold_out(fits: dict[str, CurveFit], answer: Answer) -> None:
    found = {}
    for name, fit in fits.items():
        with answer.about(name):
            found[name] = compare_held_out(fit.points, _given_R0(fit), HELD_OUT_SHARE)
    for entry in answer.runs:
        entry["held_out"] = [
            {"A": h.fit.A if h.fit else None} | _of(h, ("form", "rmse", "mean_error"))
            for h in found.get(entry["run"], ())
        ]
    answer.parts += [report.describe_held_out(found, HELD_OUT_SHARE)] if found else []


def _given_R0(fit: CurveFit) -> float | None:
    return fit.R0 if fit.R0_interval is None else None


def _compare(options: argparse.Namespace, inputs: Inputs, answer: Answer) -> None:
    need_profile(options, "compare refits with A fixed, by the default method")
    named = choose_groups(options, inputs.places)
    fits, groups = _fit_and_tell(options, inputs, answer, named)
    recipes: dict[str, CurveFit] | dict[str, GroupFit] = groups or fits
    reference = options.reference or next(iter(recipes), "")
    answer.more = {"pairs": [], "leave_one_out": [], "reference": reference}
    if len(recipes) < 2 and answer.refused:
        return
    pairs = compare_all(recipes, options.tie)
    answer.more["pairs"] = [pair.to_dict() for pair in pairs]
    answer.parts.append(report.describe_pairs(pairs, options.tie))
    known = [refusal.run for refusal in answer.refused] + list(named)
    if reference not in recipes and reference in known:  # nothing is left of it
        return
    rows = leave_one_out(recipes, reference, options.tie)
    answer.more["leave_one_out"] = [{"recipe": row.name, "A": row.fit.A} | _of(row, _ROW) for row in rows]
    answer.parts.append(report.describe_leave_one_out(rows, reference, inputs.x_label))


def _predict(options: argparse.Namespace, inputs: Inputs, answer: Answer) -> None:
    need_profile(options, "intervals of predictions come from the default method")
    for name, fit in fit_all(options, inputs, answer).items():
        with answer.about(name):
            _predict_one(options, inputs, answer, name, fit)


def _predict_one(options: argparse.Namespace, inputs: Inputs, answer: Answer, name: str, fit: CurveFit) -> None:
    last = float(fit.points.compute[-1])
    asked = options.at or options.reach or options.budget is not None
    at = options.at if asked else [last, 2 * last, 4 * last]
    predicted = predict(fit, at) if at else None
    reaches = [compute_to_reach(fit, score) for score in options.reach]
    gain = None if options.budget is None else worth_going_on(fit, options.budget)
    past = rank_past(fit.points, _given_R0(fit), SHARES)
    warning = rival_report.warn_of_past(fit, past, predicted)
    described = report.describe_prediction(fit, predicted, reaches, gain, inputs.x_label)
    answer.parts += filter(None, [f"{name}\n{described}", warning])
    rows = [] if predicted is None else list(zip(*(getattr(predicted, key) for key in _BAND), strict=True))
    answer.runs.append(
        {
            **inputs.entry(name),
            **fit.to_dict(),
            "predictions": [dict(zip(_BAND, row, strict=True)) for row in rows],
            "reach": [_of(reach, _BAND) for reach in reaches],
            "gain": None if gain is None else dict(vars(gain)),
            "past": None if past is None else past.to_dict(),
        }
    )


_BAND = ("compute", "score", "low", "high")
_ROW = ("delta_A", "tied", "B_common", "B_common_interval")


def _of(value: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _backtest(options: argparse.Namespace, inputs: Inputs, answer: Answer) -> None:
    need_profile(options, "backtest uses the default method")
    R0, found = choose_R0(options), {}
    for name, curve in inputs.curves.items():
        with answer.about(name):
            points = choose_points(options, curve).after(options.warm_up)
            forecasts = backtest(points, R0=R0, shares=options.shares, level=options.level, errors=options.errors)
            if all(forecast.fit is None for forecast in forecasts):
                reasons = "; ".join(f"of {forecast.share:.0%}: {forecast.refused}" for forecast in forecasts)
                raise FitRefused("no_forecast", f"no forecast could be made. {reasons}")
            found[name] = forecasts
    for name, forecasts in found.items():
        ranking = rank_forecasts(forecasts)
        overall = None if ranking is None else ranking.to_dict()
        told = [forecast.to_dict() for forecast in forecasts]
        answer.runs.append(inputs.entry(name) | {"forecasts": told, "overall": overall})
    answer.parts += [report.describe_backtest(found), rival_report.describe_rivals(found)] if found else []
    fits = [forecast.fit for forecasts in found.values() for forecast in forecasts]
    answer.is_identified = all(fit is not None and fit.identified for fit in fits)


def _plot(options: argparse.Namespace, inputs: Inputs, answer: Answer) -> None:
    """What is identified stands in the picture and in the JSON: the exit code says whether all was drawn."""
    from scalerl_verl.scaling.plot import EXTRAPOLATE, check_name, write_plot

    path = Path(options.out)
    check_name(path)
    fits = fit_all(options, inputs, answer)
    answer.is_identified = True
    answer.more["picture"] = None
    if not fits:
        return
    until = options.until or EXTRAPOLATE * max(float(fit.points.compute[-1]) for fit in fits.values())
    try:
        note = write_plot(fits, path, inputs.x_label, kind=options.kind, until=options.until, title=options.title)
    except OSError as error:
        raise ReadError(f"--out {path} cannot be written: {error.strerror or error}") from error
    if note:
        print(f"note: {note}", file=sys.stderr)
    answer.parts.append(f"Written: {options.out}")
    answer.more["picture"] = {
        "file": str(path),
        "kind": options.kind,
        "title": options.title,
        "x_label": inputs.x_label,
        "until": until,
    }
    for name, fit in fits.items():
        points = _of(fit.points, ("compute", "score", "stderr"))
        answer.runs.append(inputs.entry(name) | fit.to_dict() | {"points": points})


_COMMANDS: dict[str, Callable[[argparse.Namespace, Inputs, Answer], None]] = {
    "fit": _fit,
    "compare": _compare,
    "predict": _predict,
    "backtest": _backtest,
    "plot": _plot,
    "sizes": run_sizes,
    "advise": run_advise,
}
