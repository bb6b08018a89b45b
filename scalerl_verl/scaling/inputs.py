# SPDX-License-Identifier: Apache-2.0
"""From the arguments of a curve command to curves, points and the settings of a fit."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from scalerl_verl.scaling.answer import Answer
from scalerl_verl.scaling.fit.fitting import fit_points
from scalerl_verl.scaling.fit.paper_grid import MAX_VALUES, Grid
from scalerl_verl.scaling.fit.points import COMPUTE_RANGE, Points
from scalerl_verl.scaling.fit.result import CurveFit
from scalerl_verl.scaling.logs.reading import read_run, read_runs
from scalerl_verl.scaling.logs.segments import ReadError, RunLog
from scalerl_verl.scaling.logs.selection import Curve, choose_curve
from scalerl_verl.terminal import printable

NUM_RESAMPLES = range(2, 1_000_001)


@dataclass
class Inputs:
    """Curves by name, in the order given.

    places: by name of the run, what was given, then the files that were read; a run that could not be read has its path
    for a name, and no files.
    """

    curves: dict[str, Curve] = field(default_factory=dict)
    places: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def x_label(self) -> str:
        """Name of the compute, for people; empty without a curve."""
        return next((curve.x_label for curve in self.curves.values()), "")

    def entry(self, name: str) -> dict[str, Any]:
        """What the JSON of every command says of a run first."""
        curve = self.curves[name]
        return {"run": name, "x": curve.x_name, "y": curve.y_name}


@dataclass(frozen=True)
class _Read:
    """A run, the paths that were given for it, and whether no other run was there."""

    run: RunLog
    given: list[str]
    is_alone: bool


def read_inputs(options: argparse.Namespace, answer: Answer) -> Inputs:
    """Read every run; one that cannot be read is noted in `answer`, and does not hide the others.

    Raises:
        ReadError: arguments that do not fit each other or the runs.
    """
    parts = [options.runs] if options.join else [[path] for path in options.runs]
    names = options.names or [None] * len(parts)
    if len(names) != len(parts):
        raise ReadError(f"--names has {len(names)} names for {len(parts)} run(s)")
    if options.names and len(set(names)) < len(names):
        raise ReadError(f"--names gives {max(names, key=names.count)} to two runs")
    places = [os.path.realpath(path) for path in options.runs]  # which takes circles of links for what they are
    if len(set(places)) < len(places):
        raise ReadError(f"{max(places, key=places.count)} is given twice")
    inputs, read = Inputs(), list[_Read]()

    def tell(file: Path, error: Exception) -> None:
        with answer.reading(str(file)):
            raise error
        inputs.places[str(file)] = (str(file),)

    for given, name in zip(parts, names, strict=True):
        label = name or given[0]
        with answer.reading(label):
            runs = [read_run(given, name)] if options.join else read_runs(given[0], name, tell)
            read += [_Read(run, given, len(runs) == 1) for run in runs]
            continue
        # Here only after the block noted that it cannot be read.
        inputs.places[label] = (given[0],)
    _refuse_overlap(read)
    for item, label in zip(read, _name_apart(read), strict=True):
        _add(replace(item.run, name=label), item, options, answer, inputs)
    _tell_scores(inputs)
    labels = {curve.x_label for curve in inputs.curves.values()}
    if len(labels) > 1:
        raise ReadError(f"the runs have different x by default ({', '.join(sorted(labels))}): choose one with --x")
    return inputs


def _tell_scores(inputs: Inputs) -> None:
    """Say when runs have different scores: a log of another kind may call the same metric by another name."""
    scores: dict[str, str] = {}
    for name, curve in inputs.curves.items():
        scores.setdefault(curve.y_name, name)
    if len(scores) > 1:
        told = ", ".join(f"{score} ({name})" for score, name in scores.items())
        print(f"note: the runs have different scores: {told}; choose one with --y if they differ", file=sys.stderr)


def _refuse_overlap(read: list[_Read]) -> None:
    """Refuse a file that is read for two of the paths given: a folder and a file in it."""
    owner: dict[str, str] = {}
    for item in read:
        for source in item.run.sources:
            other = owner.setdefault(os.path.realpath(source), item.given[0])
            if other != item.given[0]:
                raise ReadError(f"{source} is given twice, by {other} and by {item.given[0]}: leave one of them out")


def _name_apart(read: list[_Read]) -> list[str]:
    """A name for each run that no other has, whatever the order of the runs.

    All that share a name have their paths, as runs/a/metrics.jsonl and runs/b/metrics.jsonl.

    Raises:
        ReadError: two have one name and one path.
    """
    names = [printable(item.run.name) for item in read]
    times = Counter(names)
    for i, (item, name) in enumerate(zip(read, names, strict=True)):
        if times[name] > 1:
            path = printable(str(Path(item.given[0])))
            names[i] = path if item.is_alone else f"{path}/{name}"
    name, most = Counter(names).most_common(1)[0] if names else ("", 1)
    if most > 1:
        raise ReadError(f"{most} runs have the name {name}: give each a file of its own")
    return names


def _add(run: RunLog, item: _Read, options: argparse.Namespace, answer: Answer, inputs: Inputs) -> None:
    """Choose the curve of a run; one that has none is noted like one that cannot be read."""
    label = item.given[0] if item.is_alone else run.name
    with answer.about(label):
        curve = choose_curve(run, options.x, options.y)
        if curve.x_name == curve.y_name:
            raise ReadError(f"{curve.x_name} is both --x and --y: a curve has a score over compute")
        for note in filter(None, (run.describe_missing(), *curve.notes)):
            print(f"note: {note}", file=sys.stderr)
        inputs.curves[run.name] = curve
        inputs.places[run.name] = (*item.given, *run.sources)
        return
    inputs.places[label] = (item.given[0],)


def fit_all(options: argparse.Namespace, inputs: Inputs, answer: Answer) -> dict[str, CurveFit]:
    """A fit per curve; a run that is refused is noted in `answer`, as is whether A is identified in all.

    Raises:
        ReadError: a setting of the fit that means nothing.
    """
    R0, grid = choose_R0(options), read_grid(options)
    fits = {}
    for name, curve in inputs.curves.items():
        with answer.about(name):
            fits[name] = fit_points(
                choose_points(options, curve),
                R0=R0,
                method=options.method,
                warm_up=options.warm_up,
                level=options.level,
                errors=options.errors,
                grid=grid,
            )
    answer.is_identified = all(fit.identified for fit in fits.values())
    return fits


def choose_points(options: argparse.Namespace, curve: Curve) -> Points:
    """The points of a curve; with `--R0 fit` without the score before training.

    Raises:
        FitRefused: the values are no points of a curve.
    """
    points = curve.points()
    return points.trained if options.R0 == "fit" else points


def check_numbers(options: argparse.Namespace) -> None:
    """Refuse amounts and counts that mean nothing, before anything is read.

    Raises:
        ReadError: names the option.
    """
    for name, least in (("at", None), ("budget", None), ("until", None), ("warm_up", 0.0)):
        given = getattr(options, name, None)
        for value in given if isinstance(given, list) else [] if given is None else [given]:
            if not (value == least or COMPUTE_RANGE[0] <= value <= COMPUTE_RANGE[1]):
                what = "a positive number" if least is None else "0 or a positive number"
                raise ReadError(f"--{name.replace('_', '-')} {value:g}: give {what}, at most {COMPUTE_RANGE[1]:g}")
    if getattr(options, "seed", 0) < 0:
        raise ReadError(f"--seed {options.seed}: give a whole number of 0 or more")
    if getattr(options, "bootstrap", 0) and options.bootstrap not in NUM_RESAMPLES:
        raise ReadError(
            f"--bootstrap {options.bootstrap}: give 0 for none, or a number of resamples from {NUM_RESAMPLES[0]} to "
            f"{NUM_RESAMPLES[-1]:,}; 1,000 give steady 95% intervals"
        )


def choose_R0(options: argparse.Namespace) -> float | None:
    """R0 by `--R0`; None to fit it, with or without an observation.

    Raises:
        ReadError: neither a number nor `fit` nor `auto`.
    """
    if options.R0 in ("auto", "fit"):
        return None
    try:
        R0 = float(options.R0)
    except ValueError:
        R0 = float("nan")
    if not 0 <= R0 < 1:
        raise ReadError(f"--R0 {options.R0}: give a number from 0 to below 1, `fit` or `auto`")
    return R0


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
        usage = "--grid-A FROM:TO:STEP"
        first, last, step = _three(options.grid_A, usage)
        _check_num((last - first) / step, options.grid_A, usage)
        values["A"] = np.round(np.arange(first, last + step / 2, step), 9)
    if options.grid_C_mid is not None:
        parts = []
        for text in options.grid_C_mid.split(","):
            usage = "--grid-C-mid FROM:TO:NUM[,...]"
            first, last, num = _three(text, usage)
            _check_num(num, text, usage)
            if num != int(num):
                raise ReadError(f"{text!r} is no grid: NUM must be a whole number ({usage})")
            parts.append(np.linspace(first, last, int(num)))
        values["C_mid"] = np.unique(np.concatenate(parts))
    return Grid(**values)


def _three(text: str, usage: str) -> tuple[float, float, float]:
    try:
        first, last, third = (float(part) for part in text.split(":"))
    except ValueError:
        raise ReadError(f"{text!r} is no grid: {usage}") from None
    if not (math.isfinite(first + last + third) and last > first and third > 0):
        raise ReadError(f"{text!r} is no grid: TO must exceed FROM and the last number 0, all finite ({usage})")
    return first, last, third


def _check_num(num: float, text: str, usage: str) -> None:
    if num > MAX_VALUES:
        raise ReadError(
            f"{text!r} has {num:,.0f} values; at most {MAX_VALUES:,} are allowed: give a coarser grid ({usage})"
        )


def need_profile(options: argparse.Namespace, why: str) -> None:
    """Refuse method `paper`, which has no likelihood.

    Raises:
        ReadError: it was asked for.
    """
    if options.method != "profile":
        raise ReadError(f"{why}: leave --method paper out")
