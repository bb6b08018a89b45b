# SPDX-License-Identifier: Apache-2.0
"""From the arguments of a curve command to curves, points and the settings of a fit."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scalerl_verl.scaling.answer import Answer
from scalerl_verl.scaling.fit.fitting import fit_points
from scalerl_verl.scaling.fit.paper_grid import Grid
from scalerl_verl.scaling.fit.points import Points
from scalerl_verl.scaling.fit.result import CurveFit
from scalerl_verl.scaling.logs.reading import read_run, read_runs
from scalerl_verl.scaling.logs.segments import ReadError, RunLog
from scalerl_verl.scaling.logs.selection import Curve, choose_curve


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

    def add(self, curve: Curve, given: list[str], sources: tuple[str, ...], is_alone: bool) -> None:
        """Add a curve under a name that no other one has; is_alone: no other run was in its place.

        Raises:
            ReadError: there is none.
        """
        label = curve.name
        if label in self.curves:  # runs/a/metrics.jsonl and runs/b/metrics.jsonl
            label = str(Path(given[0])) if is_alone else f"{Path(given[0])}/{label}"
        if label in self.curves:
            raise ReadError(f"{label} is given twice")
        self.curves[label] = curve
        self.places[label] = (*given, *sources)


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
    inputs = Inputs()
    for given, name in zip(parts, names, strict=True):
        label = name or given[0]
        with answer.reading(label):
            runs = [read_run(given, name)] if options.join else read_runs(given[0], name)
            _add_all(runs, given, options, answer, inputs)
            continue
        # Here only after the block noted that it cannot be read.
        inputs.places[label] = (given[0],)
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


def _add_all(runs: list[RunLog], given: list[str], options: argparse.Namespace, answer: Answer, inputs: Inputs) -> None:
    """Choose the curve of every run that one place holds; one that has none is noted like one that cannot be read."""
    for run in runs:
        label = run.name if len(runs) > 1 else given[0]
        with answer.about(label):
            curve = choose_curve(run, options.x, options.y)
            if curve.x_name == curve.y_name:
                raise ReadError(f"{curve.x_name} is both --x and --y: a curve has a score over compute")
            for note in filter(None, (run.describe_missing(), *curve.notes)):
                print(f"note: {note}", file=sys.stderr)
            inputs.add(curve, given, run.sources, is_alone=len(runs) == 1)
            continue
        inputs.places[label] = (given[0],)


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


def need_profile(options: argparse.Namespace, why: str) -> None:
    """Refuse method `paper`, which has no likelihood.

    Raises:
        ReadError: it was asked for.
    """
    if options.method != "profile":
        raise ReadError(f"{why}: leave --method paper out")
