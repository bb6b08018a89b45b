# SPDX-License-Identifier: Apache-2.0
"""Tables and picture of the miniature's recorded curves: recipes beside ScaleRL, paired by seed.

Seeds share a warm start across recipes, so differences are taken within a seed; intervals are Student's over seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rows import REPO, commits_text, read_rows
from scipy import stats

from scalerl_verl.curves.plot import write_plot
from scalerl_verl.scaling import fit_curve
from scalerl_verl.scaling.backtest import backtest
from scalerl_verl.scaling.result import CurveFit

MAIN = ("scalerl", "grpo", "dapo", "gspo")
REFERENCE = "scalerl"
KEPT = "no_positive_resampling_off"
LABELS = {
    "scalerl": "ScaleRL",
    "grpo": "GRPO",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "no_loss": "GRPO's clip for CISPO",
    "no_prompt_average": "token average",
    "no_batch_normalisation": "prompt normalisation",
    "no_zero_variance_filtering": "zero-variance prompts kept",
    "no_positive_resampling_off": "mastered problems drawn again",
    "no_forced_interruption": "no interruption",
}
PICTURE = REPO / "docs" / "evidence.png"
EARLY, LATE = 0.6e6, 1.8e6
"""Sampled tokens: just before the first pass over the problems ends, and the most that all recipes have."""
POWER, LEVEL = 0.8, 0.95
Runs = dict[str, dict[int, dict[str, Any]]]


def read_runs(size: str, k: int, problems: int = 2048) -> Runs:
    """recipe -> seed -> points, of the newest recording of each run on so many training problems."""
    runs: Runs = {}
    for row in read_rows("miniature"):
        case = row["case"]
        if (case["size"], case["k"], case["train_problems"]) == (size, k, problems):
            runs.setdefault(row["impl"], {})[case["seed"]] = row["points"]
    return {name: runs[name] for name in sorted(runs, key=list(LABELS).index)}


def score_at(points: dict[str, Any], tokens: float) -> float | None:
    """Pass rate at a budget, between validations on a line over the logarithm of tokens; None beyond the last."""
    if tokens > points["tokens"][-1]:
        return None
    compute = np.log(np.array(points["tokens"][1:]))
    return float(np.interp(math.log(tokens), compute, points["pass_rate"][1:]))


def mean_curve(runs: dict[int, dict[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, pass rate and standard error over seeds' means of the first points that all seeds have."""
    length = min(len(points["tokens"]) for points in runs.values())
    columns = [np.array([p[name][:length] for p in runs.values()]) for name in ("tokens", "pass_rate", "stderr")]
    tokens, scores, errors = columns
    return tokens.mean(0), scores.mean(0), np.sqrt(np.square(errors).sum(0)) / len(runs)


def fit_mean(runs: dict[int, dict[str, Any]]) -> CurveFit:
    """Fit of the mean over seeds; R0 is what was measured before training."""
    tokens, scores, errors = mean_curve(runs)
    used = tokens > 0
    return fit_curve(tokens[used], scores[used], errors[used], R0=float(scores[0]))


def paired(runs: Runs, name: str, reference: str, tokens: float) -> list[float]:
    """Differences within seeds at a budget."""
    pairs = [
        (score_at(runs[name][seed], tokens), score_at(points, tokens))
        for seed, points in runs[reference].items()
        if seed in runs[name]
    ]
    return [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]


def half_width(differences: Sequence[float]) -> float:
    """Of the interval of their mean."""
    degrees = len(differences) - 1
    return float(stats.t.ppf((1 + LEVEL) / 2, degrees)) * statistics.stdev(differences) / math.sqrt(len(differences))


def detectable(differences: Sequence[float]) -> float:
    """The difference that so many seeds would show in four of five tries, at the spread these have."""
    degrees = len(differences) - 1
    factor = float(stats.t.ppf((1 + LEVEL) / 2, degrees) + stats.t.ppf(POWER, degrees))
    return factor * statistics.stdev(differences) / math.sqrt(len(differences))


def holm(p: Mapping[Any, float]) -> dict[Any, float]:
    """p values corrected for their number (Holm 1979, doi 10.2307/4615733), smallest first."""
    corrected, highest = {}, 0.0
    for rank, key in enumerate(sorted(p, key=p.__getitem__)):
        highest = max(highest, min(1.0, p[key] * (len(p) - rank)))
        corrected[key] = highest
    return corrected


def correction(p: Mapping[tuple[str, float], float]) -> str:
    """How many comparisons a table makes, and which of them stay significant together."""
    if len(p) == 1:
        return "One comparison."
    stay: dict[float, list[str]] = {}
    for (name, budget), value in holm(p).items():
        if value < 1 - LEVEL:
            stay.setdefault(budget, []).append(LABELS[name])
    told = "; ".join(f"at {budget / 1e6:g}M {', '.join(names)}" for budget, names in sorted(stay.items()))
    return f"{len(p)} comparisons; by Holm's correction for so many, what stays below .05 is: {told or 'nothing'}."


def comparison_table(
    size: str = "0.3M",
    k: int = 8,
    budgets: Sequence[float] = (EARLY, LATE),
    reference: str = REFERENCE,
    names: Sequence[str] = tuple(LABELS),
) -> str:
    """One line a recipe: pass rate at the budgets and the paired difference to the reference, with its power."""
    runs = {name: found for name, found in read_runs(size, k).items() if name in (*names, reference)}
    if not runs:
        return "Not recorded yet: `python benchmarks/bench_miniature.py`."
    heads = [f"pass rate at {budget / 1e6:g}M tokens | difference | detectable" for budget in budgets]
    lines = [f"| recipe | {' | '.join(heads)} |", "|---" * (1 + 3 * len(budgets)) + "|"]
    p: dict[tuple[str, float], float] = {}
    for name in runs:
        cells = []
        for budget in budgets:
            scores = [s for p in runs[name].values() if (s := score_at(p, budget)) is not None]
            differences = paired(runs, name, reference, budget)
            if len(scores) < len(runs[name]):
                cells.append("not run so far | |")
                continue
            if any(differences):
                p[name, budget] = float(stats.ttest_1samp(differences, 0).pvalue)
            cells.append(f"{statistics.fmean(scores):.3f} | {_difference(differences, name == reference)}")
        if any("not run" not in cell for cell in cells):
            lines.append(f"| {LABELS[name]} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{footer(size, k, LABELS[reference])} {correction(p)}"])


def _difference(differences: Sequence[float], is_reference: bool) -> str:
    if is_reference:
        return " | "
    if not any(differences):
        return "the same run so far | "
    mean, half = statistics.fmean(differences), half_width(differences)
    shown = f"{mean:+.3f} ± {half:.3f}"
    return f"{f'**{shown}**' if abs(mean) > half else shown} | {detectable(differences):.3f}"


def fits_table(size: str = "0.3M", k: int = 8) -> str:
    """One line a recipe: the fit of the mean over seeds, and its half-budget forecast against what happened."""
    runs = read_runs(size, k)
    if not runs:
        return "Not recorded yet: `python benchmarks/bench_miniature.py`."
    lines = [
        "| recipe | tokens | A | 95% interval | B | C_mid, tokens | verdict | end, forecast from half | was |",
        "|---" * 9 + "|",
    ]
    for name, found in runs.items():
        tokens, scores, _ = mean_curve(found)
        if tokens[-1] < LATE:
            continue
        fit = fit_mean(found)
        forecast = backtest(fit.points, R0=float(scores[0]), shares=(0.5,))[0]
        end = float(fit.points.score[-1])
        expected = "refused" if forecast.fit is None else f"{end + forecast.last_error:.3f}, {forecast.fit.verdict}"
        low, high = fit.A_interval
        lines.append(
            f"| {LABELS[name]} | {tokens[-1]:.2g} | {fit.A:.3f} | {low:.3f} to {high:.3f} | {fit.B:.2f} "
            f"| {fit.C_mid:,.0f} | {fit.verdict} | {expected} | {end:.3f} |"
        )
    return "\n".join(lines)


def footer(size: str, k: int, reference: str) -> str:
    """Where the numbers of one size come from."""
    mine = [row for row in read_rows("miniature") if (row["case"]["size"], row["case"]["k"]) == (size, k)]
    case, last = mine[-1]["case"], mine[-1]
    seeds = sorted({row["case"]["seed"] for row in mine})
    commits = commits_text(mine)
    return (
        f"{size} parameters, {len(seeds)} seeds, each with a warm start of its own that all recipes share; k = {k} "
        f"optimizer steps of 32 x 16 responses on a generated batch, learning rate {case['lr']:g}; "
        f"{case['train_problems']:,} training problems; {case['test_problems']:,} held-out problems, 4 samples each. "
        f"Differences to *{reference}* within seeds with 95% intervals, in bold where 0 is outside; *detectable*: what "
        f"{len(seeds)} seeds of this spread show in 80% of tries. {last['hardware']}, driver {last['driver']}, torch "
        f"{last['versions']['torch']}; commit {commits}; `bench_miniature.py`."
    )


def draw(path: Path = PICTURE, size: str = "0.3M", k: int = 8) -> None:
    """Fitted curves of ScaleRL, ScaleRL without no-positive-resampling and the baselines."""
    runs = read_runs(size, k)
    names = ("scalerl", "no_positive_resampling_off", "grpo", "dapo", "gspo")
    labels = LABELS | {"no_positive_resampling_off": "ScaleRL, all problems kept"}
    fits = {labels[name]: fit_mean(runs[name]) for name in names if name in runs}
    seeds = len(runs[REFERENCE])
    title = f"{size} parameters, k = {k}, mean over {seeds} seeds"
    write_plot(fits, path, "sampled tokens", title=title)


def kept_table() -> str:
    """The baselines beside ScaleRL without the piece that they do not have either."""
    return comparison_table(reference=KEPT, names=MAIN[1:])


def larger_table() -> str:
    """The larger model, as far as it was run."""
    return comparison_table("3M", 8, (0.4e6,))


if __name__ == "__main__":
    draw()
