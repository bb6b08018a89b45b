# SPDX-License-Identifier: Apache-2.0
"""Which setting measured curves favour for a budget: responses a prompt, prompts a batch, or any other.

arXiv 2603.12151 finds that the best number of responses a prompt grows with the budget and then saturates, and that the
number of prompts matters little within a broad range. Here nothing of that is assumed: settings are compared at the
budget by their own curves, and only where a run says something about it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import norm
from scipy.stats import t as student

from scalerl_verl.scaling.fit.groups import RUN_SPREAD, pool
from scalerl_verl.scaling.fit.prediction import predict
from scalerl_verl.scaling.fit.result import CurveFit, Interval
from scalerl_verl.scaling.fit.settings import Settings, describe

BEYOND = 2.0
"""How far past its last point an identified curve is trusted, a factor of compute."""
PLACES = 5
"""Budgets at which the best setting is looked for, between the smallest and the largest that runs support."""

Key = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Candidate:
    """One setting at the budget.

    score, interval: mean over its runs, of another run with this setting. runs: those that support the budget.
    is_tied: the difference to the best one does not exclude 0.
    """

    settings: Settings
    score: float
    interval: Interval
    runs: tuple[str, ...]
    is_tied: bool


@dataclass(frozen=True)
class Advice:
    """What runs say about a budget.

    candidates: best first; none where no run supports the budget. left_out: run -> why it says nothing about it.
    edges: setting -> whether the best value is the ``smallest`` or ``largest`` of several that were tried.
    """

    budget: float
    candidates: tuple[Candidate, ...]
    left_out: dict[str, str]
    edges: dict[str, str]

    @property
    def compares(self) -> bool:
        """Whether two settings or more say something about the budget."""
        return len(self.candidates) > 1

    @property
    def tied(self) -> tuple[Candidate, ...]:
        """Settings that the runs do not tell from the best one."""
        return tuple(candidate for candidate in self.candidates[1:] if candidate.is_tied)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "budget": self.budget,
            "candidates": [dict(vars(candidate)) for candidate in self.candidates],
            "left_out": self.left_out,
            "edges": self.edges,
        }


def advise(fits: Mapping[str, CurveFit], settings: Mapping[str, Settings], budget: float) -> Advice:
    """Compare settings by what their curves say at a budget; runs of equal settings are seeds of one.

    Args:
        fits: of the runs, all in the same unit of compute.
        settings: of each of them, the same names everywhere.
        budget: total compute of a run, in that unit.

    Raises:
        ValueError: a budget that is not positive, or fewer than two settings.
    """
    if not (math.isfinite(budget) and budget > 0):
        raise ValueError(f"budget={budget!r} must be a positive amount of compute")
    check_different([settings[name] for name in fits])
    left_out = {name: reason for name, fit in fits.items() if (reason := _silent(fit, budget)) is not None}
    groups: dict[Key, list[str]] = {}
    for name in fits:
        if name not in left_out:
            groups.setdefault(_key(settings[name]), []).append(name)
    means = {key: _mean(fits, names, budget) for key, names in groups.items()}
    ordered = sorted(groups, key=lambda key: -means[key][0])
    level = next(iter(fits.values())).level
    candidates = []
    for key in ordered:
        score, variance, dof = means[key]
        best_score, best_variance, best_dof = means[ordered[0]]
        half = float(student.ppf(0.5 + level / 2, dof)) * math.sqrt(variance)
        apart = float(student.ppf(0.5 + level / 2, dof + best_dof)) * math.sqrt(variance + best_variance)
        interval = (max(score - half, 0.0), min(score + half, 1.0))
        candidates.append(Candidate(dict(key), score, interval, tuple(groups[key]), best_score - score <= apart))
    edges = _edges(dict(ordered[0]), [dict(key) for key in groups]) if ordered else {}
    return Advice(budget, tuple(candidates), left_out, edges)


def check_different(settings: Iterable[Settings]) -> None:
    """Refuse runs that all have one setting.

    Raises:
        ValueError: they have.
    """
    found = {_key(item): item for item in settings}
    if len(found) < 2:
        told = "".join(f" ({describe(item)})" for item in found.values())
        raise ValueError(f"all runs have the same settings{told}: advice needs runs of two settings or more")


def supported_budgets(fits: Mapping[str, CurveFit]) -> list[float]:
    """Budgets that every run says something about, on a logarithmic grid; none where there is no such budget."""
    if not fits:
        return []
    low = max(float(fit.points.trained.compute[0]) for fit in fits.values())
    high = min(float(fit.points.compute[-1]) for fit in fits.values())
    return [float(budget) for budget in np.geomspace(low, high, PLACES)] if high > low else []


def best_by_budget(
    fits: Mapping[str, CurveFit], settings: Mapping[str, Settings], budgets: Sequence[float]
) -> list[tuple[float, str, bool]]:
    """At each budget the best setting, in words, and whether another one is tied with it."""
    advices = [advise(fits, settings, budget) for budget in budgets]
    return [(a.budget, describe(a.candidates[0].settings), bool(a.tied)) for a in advices if a.compares]


def _key(settings: Settings) -> Key:
    return tuple(settings.items())


def _silent(fit: CurveFit, budget: float) -> str | None:
    """Why a run says nothing about a budget; None if it does."""
    first, last = float(fit.points.trained.compute[0]), float(fit.points.compute[-1])
    if fit.leaves_its_curve:
        return f"its points leave its curve ({fit.verdict})"
    if budget < first:
        return f"its first point is at {first:.4g}"
    if budget > last and not fit.identified:
        return f"it ends at {last:.4g}, and A is not identified ({fit.verdict})"
    if budget > BEYOND * last:
        return f"it ends at {last:.4g}; curves are trusted up to {BEYOND:g} times that"
    return None


def _mean(fits: Mapping[str, CurveFit], names: Sequence[str], budget: float) -> tuple[float, float, int]:
    """Mean score of seeds at a budget, the variance of that mean, and its degrees of freedom."""
    predictions = [predict(fits[name], [budget]) for name in names]
    scores = np.array([float(prediction.score[0]) for prediction in predictions])
    z = float(norm.ppf(0.5 + predictions[0].level / 2))
    own = float(np.mean([((float(p.high[0]) - float(p.low[0])) / 2 / z) ** 2 for p in predictions]))
    variance, dof = pool([scores.tolist()], own, RUN_SPREAD)
    return float(scores.mean()), variance / len(scores), dof


def _edges(best: Settings, tried: Sequence[Settings]) -> dict[str, str]:
    found = {}
    for name, value in best.items():
        values = {settings[name] for settings in tried}
        if len(values) > 1 and value in (min(values), max(values)):
            found[name] = "largest" if value == max(values) else "smallest"
    return found
