# SPDX-License-Identifier: Apache-2.0
"""`scalerl fit | compare | predict | backtest | plot`."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalerl_verl.scaling import report, rival_report
from scalerl_verl.scaling.fit.backtest import SHARES, backtest, rank_forecasts
from scalerl_verl.scaling.fit.bootstrap import Bootstrap, bootstrap
from scalerl_verl.scaling.fit.compare import compare_all, leave_one_out
from scalerl_verl.scaling.fit.fitting import fit_points
from scalerl_verl.scaling.fit.paper_grid import Grid
from scalerl_verl.scaling.fit.points import FitRefused, Points
from scalerl_verl.scaling.fit.prediction import compute_to_reach, predict, worth_going_on
from scalerl_verl.scaling.fit.result import CurveFit
from scalerl_verl.scaling.fit.rivals import compare_held_out, rank_past
from scalerl_verl.scaling.logs.reading import read_run
from scalerl_verl.scaling.logs.segments import ReadError
from scalerl_verl.scaling.logs.selection import Curve, choose_curve

OK, WRONG, NOT_IDENTIFIED, REFUSED = 0, 1, 3, 4
HELD_OUT_SHARE = 0.5


def run_command(options: argparse.Namespace) -> int:
    """Run one of the commands; returns the exit code (see `arguments.EXIT_CODES`)."""
    try:
        curves = read_curves(options)
        return _COMMANDS[options.command](options, curves)
    except FitRefused as refusal:
        return _refuse(options, refusal)
    except ValueError as error:  # ReadError among them
        print(f"error: {error}", file=sys.stderr)
        return WRONG


def _refuse(options: argparse.Namespace, refusal: FitRefused) -> int:
    name = getattr(refusal, "run_name", "")
    if options.json:
        nothing = dict.fromkeys(("A", "B", "C_mid", "R0", "A_interval", "B_interval", "C_mid_interval", "sse"))
        _print_json({"run": name, **nothing, "verdict": refusal.code, "identified": False, "refused": str(refusal)})
    print(f"refused: {name + ': ' if name else ''}{refusal}", file=sys.stderr)
    return REFUSED


def read_curves(options: argparse.Namespace) -> dict[str, Curve]:
    """Curves by name, in the order given.

    Raises:
        ReadError: a log that cannot be read, or names that do not fit.
    """
    groups = [options.runs] if options.join else [[path] for path in options.runs]
    names = options.names or [None] * len(groups)
    if len(names) != len(groups):
        raise ReadError(f"--names has {len(names)} names for {len(groups)} run(s)")
    places = [Path(path).resolve() for path in options.runs]
    if len(set(places)) < len(places):
        raise ReadError(f"{max(places, key=places.count)} is given twice")
    curves: dict[str, Curve] = {}
    for group, name in zip(groups, names, strict=True):
        run = read_run(group, name)
        missing = run.describe_missing()
        if missing is not None:
            print(f"note: {missing}", file=sys.stderr)
        curve = choose_curve(run, options.x, options.y)
        label = curve.name
        if label in curves:  # runs/a/metrics.jsonl and runs/b/metrics.jsonl
            label = str(Path(group[0]))
        if label in curves:
            raise ReadError(f"{label} is given twice")
        curves[label] = curve
    labels = {curve.x_label for curve in curves.values()}
    if len(labels) > 1:
        raise ReadError(f"the runs have different x by default ({', '.join(sorted(labels))}): choose one with --x")
    return curves


def fit_all(options: argparse.Namespace, curves: dict[str, Curve]) -> dict[str, CurveFit]:
    """A fit per curve.

    Raises:
        FitRefused: a curve cannot be fitted; `run_name` says which.
    """
    fits = {}
    for name, curve in curves.items():
        with _named(name):
            fits[name] = fit_points(
                choose_points(options, curve),
                R0=choose_R0(options),
                method=options.method,
                warm_up=options.warm_up,
                level=options.level,
                errors=options.errors,
                grid=read_grid(options),
            )
    return fits


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except FitRefused as refusal:
        refusal.run_name = name  # type: ignore[attr-defined]
        raise


def choose_points(options: argparse.Namespace, curve: Curve) -> Points:
    """The points of a curve; with `--R0 fit` without the score before training.

    Raises:
        FitRefused: the values are no points of a curve.
    """
    points = curve.points()
    return points.trained if options.R0 == "fit" else points


def choose_R0(options: argparse.Namespace) -> float | None:
    """R0 by `--R0`; None to fit it, with or without an observation.

    Raises:
        ReadError: neither a number nor `fit` nor `auto`.
    """
    if options.R0 in ("auto", "fit"):
        return None
    try:
        return float(options.R0)
    except ValueError:
        raise ReadError(f"--R0 {options.R0}: give a number, `fit` or `auto`") from None


def read_grid(options: argparse.Namespace) -> Grid | None:
    """The grid of method `paper`; None for its default.

    Raises:
        ReadError: text that is no grid, or a grid without the method.
    """
    if options.grid_A is None and options.grid_C_mid is None:
        return None
    if options.method != "paper":
        raise ReadError("--grid-A and --grid-C-mid belong to --method paper")
    values: dict[str, Any] = {}
    if options.grid_A is not None:
        first, last, step = _three(options.grid_A, "--grid-A FROM:TO:STEP")
        values["A"] = np.round(np.arange(first, last + step / 2, step), 9)
    if options.grid_C_mid is not None:
        parts = []
        for text in options.grid_C_mid.split(","):
            first, last, num = _three(text, "--grid-C-mid FROM:TO:NUM[,...]")
            parts.append(np.linspace(first, last, int(num)))
        values["C_mid"] = np.unique(np.concatenate(parts))
    return Grid(**values)


def _three(text: str, usage: str) -> tuple[float, float, float]:
    try:
        first, last, third = (float(part) for part in text.split(":"))
    except ValueError:
        raise ReadError(f"{text!r} is no grid: {usage}") from None
    if not (last > first and third > 0):
        raise ReadError(f"{text!r} is no grid: TO must exceed FROM and the last number 0 ({usage})")
    return first, last, third


def _fit(options: argparse.Namespace, curves: dict[str, Curve]) -> int:
    fits = fit_all(options, curves)
    bootstraps: dict[str, list[Bootstrap]] = {}
    if options.bootstrap:
        bootstraps = _bootstrap(options, fits)
    held_out = {}
    if options.rivals:
        for name, fit in fits.items():
            with _named(name):
                held_out[name] = compare_held_out(fit.points, _given_R0(fit), HELD_OUT_SHARE)
    if options.json:
        found = []
        for name, fit in fits.items():
            entry = {"run": name, "x": curves[name].x_name, "y": curves[name].y_name, **fit.to_dict()}
            if bootstraps:
                entry["bootstrap"] = [item.to_dict() for item in bootstraps[name]]
            if held_out:
                entry["held_out"] = [
                    {"A": h.fit.A if h.fit else None} | _of(h, ("form", "rmse", "mean_error")) for h in held_out[name]
                ]
            found.append(entry)
        _print_json(found[0] if len(found) == 1 else found)
    else:
        parts = [report.describe_fits(fits, _unit(curves))]
        if bootstraps:
            parts.append(report.describe_bootstraps(bootstraps))
        if held_out:
            parts.append(report.describe_held_out(held_out, HELD_OUT_SHARE))
        print("\n\n".join(parts))
    return _code(fits)


def _given_R0(fit: CurveFit) -> float | None:
    return fit.R0 if fit.R0_interval is None else None


def _need_profile(options: argparse.Namespace, why: str) -> None:
    if options.method != "profile":
        raise ReadError(f"{why}: leave --method paper out")


def _bootstrap(options: argparse.Namespace, fits: dict[str, CurveFit]) -> dict[str, list[Bootstrap]]:
    _need_profile(options, "--bootstrap refits by the default method")
    found: dict[str, list[Bootstrap]] = {}
    for name, fit in fits.items():
        kinds = ["points"] + (["prompts"] if fit.points.prompt_scores is not None else [])
        for kind in kinds:
            with _progress(f"{name}: bootstrap over {kind}", options.bootstrap) as step:
                found.setdefault(name, []).append(
                    bootstrap(fit, kind, options.bootstrap, seed=options.seed, progress=step)
                )
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


def _compare(options: argparse.Namespace, curves: dict[str, Curve]) -> int:
    _need_profile(options, "compare refits with A fixed, by the default method")
    fits = fit_all(options, curves)
    pairs = compare_all(fits, options.tie)
    reference = options.reference or next(iter(fits))
    rows = leave_one_out(fits, reference, options.tie)
    if options.json:
        _print_json(
            {
                "fits": [{"run": name, **fit.to_dict()} for name, fit in fits.items()],
                "pairs": [pair.to_dict() for pair in pairs],
                "leave_one_out": [{"run": row.name, "A": row.fit.A} | _of(row, _ROW) for row in rows],
                "reference": reference,
            }
        )
    else:
        parts = [
            report.describe_fits(fits, _unit(curves)),
            report.describe_pairs(pairs, options.tie),
            report.describe_leave_one_out(rows, reference, _unit(curves)),
        ]
        print("\n\n".join(parts))
    return _code(fits)


def _predict(options: argparse.Namespace, curves: dict[str, Curve]) -> int:
    _need_profile(options, "intervals of predictions come from the default method")
    fits = fit_all(options, curves)
    texts, found = [], []
    for name, fit in fits.items():
        last = float(fit.points.compute[-1])
        asked = options.at or options.reach or options.budget
        at = options.at if asked else [last, 2 * last, 4 * last]
        predicted = predict(fit, at) if at else None
        reaches = [compute_to_reach(fit, score) for score in options.reach]
        gain = worth_going_on(fit, options.budget) if options.budget else None
        past = rank_past(fit.points, _given_R0(fit), SHARES)
        warning = rival_report.warn_of_past(fit, past, predicted)
        described = report.describe_prediction(fit, predicted, reaches, gain, _unit(curves))
        texts.append("\n\n".join(filter(None, [f"{name}\n{described}", warning])))
        rows = [] if predicted is None else list(zip(*(getattr(predicted, key) for key in _BAND), strict=True))
        found.append(
            {
                "run": name,
                "verdict": fit.verdict,
                "A": fit.A,
                "level": fit.level,
                "predictions": [dict(zip(_BAND, map(float, row), strict=True)) for row in rows],
                "reach": [_of(reach, _BAND) for reach in reaches],
                "gain": None if gain is None else dict(gain.__dict__),
                "past": None if past is None else past.to_dict(),
            }
        )
    if options.json:
        _print_json(found[0] if len(found) == 1 else found)
    else:
        print("\n\n".join(texts))
    return _code(fits)


_BAND = ("compute", "score", "low", "high")
_ROW = ("delta_A", "tied", "B_common", "B_common_interval")


def _of(value: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _backtest(options: argparse.Namespace, curves: dict[str, Curve]) -> int:
    _need_profile(options, "backtest uses the default method")
    found = {}
    for name, curve in curves.items():
        with _named(name):
            points = choose_points(options, curve).after(options.warm_up)
            found[name] = backtest(
                points,
                R0=choose_R0(options),
                shares=options.shares,
                level=options.level,
                errors=options.errors,
            )
    if options.json:
        listed = []
        for name, forecasts in found.items():
            ranking = rank_forecasts(forecasts)
            overall = None if ranking is None else ranking.to_dict()
            listed.append({"run": name, "forecasts": [f.to_dict() for f in forecasts], "overall": overall})
        _print_json(listed[0] if len(listed) == 1 else listed)
    else:
        print(f"{report.describe_backtest(found)}\n\n{rival_report.describe_rivals(found)}")
    fits = [forecast.fit for forecasts in found.values() for forecast in forecasts]
    if not any(fits):
        return REFUSED
    return OK if all(fit is not None and fit.identified for fit in fits) else NOT_IDENTIFIED


def _plot(options: argparse.Namespace, curves: dict[str, Curve]) -> int:
    from scalerl_verl.scaling.plot import write_plot

    fits = fit_all(options, curves)
    write_plot(fits, Path(options.out), _unit(curves), kind=options.kind, until=options.until, title=options.title)
    print(f"Written: {options.out}")
    return _code(fits)


def _unit(curves: dict[str, Curve]) -> str:
    return next(iter(curves.values())).x_label


def _code(fits: dict[str, CurveFit]) -> int:
    return OK if all(fit.identified for fit in fits.values()) else NOT_IDENTIFIED


def _print_json(value: Any) -> None:
    print(json.dumps(_plain(value), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    """JSON has no infinity and no NaN: null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


_COMMANDS: dict[str, Callable[[argparse.Namespace, dict[str, Curve]], int]] = {
    "fit": _fit,
    "compare": _compare,
    "predict": _predict,
    "backtest": _backtest,
    "plot": _plot,
}
