# SPDX-License-Identifier: Apache-2.0
"""Report a quickstart run: held-out pass rate against generated tokens, as a picture, as JSON and in a few lines.

`python recipes/quickstart/report.py --run-dir DIR --out OUTDIR` reads DIR/metrics.jsonl (verl's file logger) and
DIR/validation/<step>.jsonl (verl's validation dumps). Nothing is smoothed: every point is one evaluation.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from scalerl_verl.json_lines import split_lines
from scalerl_verl.scaling import FitRefused, fit_curve, sigmoid
from scalerl_verl.terminal import accept_any_text

TOKENS_METRIC = "scalerl/data/generated_tokens_sum"


class ReportError(ValueError):
    """The run cannot be reported; the message says what is missing and what to do."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One evaluation: pass_rate is the mean over problems, stderr their standard deviation over sqrt(num_problems)."""

    step: int
    pass_rate: float
    stderr: float
    num_problems: int
    num_samples: int


def read_jsonl(path: Path, remedy: str) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file; `remedy` tells the user what to do when there are none."""
    if not path.is_file():
        raise ReportError(f"{path} does not exist; {remedy}")
    rows = []
    for number, line in enumerate(split_lines(path.read_text(encoding="utf-8-sig")), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ReportError(f"{path} line {number} is not JSON ({error}); was the run killed? {remedy}") from error
    if not rows:
        raise ReportError(f"{path} is empty; {remedy}")
    return rows


def read_generated_tokens(run_dir: Path) -> dict[int, int]:
    """Return {step: tokens generated in that step}; of a step logged twice (a resumed run) the last value counts."""
    path = run_dir / "metrics.jsonl"
    rows = read_jsonl(path, "add `file` to trainer.logger and set VERL_FILE_LOGGER_PATH to this path, then train.")
    tokens = {row["step"]: round(row["data"][TOKENS_METRIC]) for row in rows if TOKENS_METRIC in row["data"]}
    if not tokens:
        raise ReportError(f"{path} has no {TOKENS_METRIC}; train with the scalerl plugin, which logs it.")
    return tokens


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """Return the evaluations in the order of their steps; the first is the start, before any training."""
    folder = run_dir / "validation"
    remedy = "set trainer.validation_data_dir to this folder and trainer.val_before_train=True, then train."
    if not folder.is_dir():
        raise ReportError(f"{folder} does not exist; {remedy}")
    files = sorted((int(path.stem), path) for path in folder.glob("*.jsonl") if path.stem.isdecimal())
    if not files:
        raise ReportError(f"{folder} holds no <step>.jsonl; {remedy}")
    if files[0][0] != 0:
        raise ReportError(f"{folder}/0.jsonl is missing, so the start level is unknown; {remedy}")
    if len(files) < 2:
        raise ReportError(f"{folder} holds the start evaluation only; train on, or lower trainer.test_freq.")
    evaluations = []
    problems: set[str] | None = None
    for step, path in files:
        rates = _average_by_problem(path, read_jsonl(path, "evaluate again, or delete the file."))
        if problems is not None and set(rates) != problems:
            raise ReportError(
                f"{path} evaluates other problems ({len(rates)}) than the evaluation before it ({len(problems)}); "
                "points of different problem sets cannot be compared: keep data.val_files fixed in a run."
            )
        problems = set(rates)
        means = [statistics.fmean(values) for values in rates.values()]
        if len(means) < 2:
            raise ReportError(f"{path} holds one problem, which has no standard error; evaluate on more problems.")
        stderr = statistics.stdev(means) / math.sqrt(len(means))
        num_samples = sum(len(values) for values in rates.values())
        evaluations.append(Evaluation(step, statistics.fmean(means), stderr, len(means), num_samples))
    return evaluations


def _average_by_problem(path: Path, rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if "input" not in row or row.get("acc") is None:
            raise ReportError(f"{path}: a sample lacks `input` or `acc`; train with recipes/quickstart/reward.py.")
        rates[row["input"]].append(float(row["acc"]))
    return rates


def summarise(
    evaluations: list[Evaluation],
    tokens_by_step: dict[int, int],
    wall_s: float | None = None,
    peak_gib: float | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """Return the content of summary.json; `clear`: the two-standard-error bars of start and end do not touch."""
    final_step = evaluations[-1].step
    missing = [step for step in range(1, final_step + 1) if step not in tokens_by_step]
    if missing:
        raise ReportError(
            f"metrics.jsonl has no {TOKENS_METRIC} for {len(missing)} of the steps 1 to {final_step}, the first being "
            f"step {missing[0]}; if the run was resumed, put the earlier run's lines in front of the file."
        )
    points = []
    for evaluation in evaluations:
        generated = sum(tokens_by_step[step] for step in range(1, evaluation.step + 1))
        points.append(
            {
                "step": evaluation.step,
                "generated_tokens": generated,
                "pass_rate": evaluation.pass_rate,
                "stderr": evaluation.stderr,
            }
        )
    start, final = evaluations[0], evaluations[-1]
    summary: dict[str, Any] = {} if seed is None else {"seed": seed}
    for name, evaluation in (("start", start), ("final", final)):
        summary[name] = {key: value for key, value in dataclasses.asdict(evaluation).items() if key != "step"}
    return summary | {
        "gain": final.pass_rate - start.pass_rate,
        # As if start and end were independent; they share their problems, so this errs on the wide side.
        "gain_stderr": math.hypot(start.stderr, final.stderr),
        "clear": start.pass_rate + 2 * start.stderr < final.pass_rate - 2 * final.stderr,
        "points": points,
        "generated_tokens": points[-1]["generated_tokens"],
        "steps": final_step,
        "fit": fit_points(points),
        "wall_s": wall_s,
        "peak_gib": peak_gib,
    }


def fit_points(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Fit the sigmoid of ScaleRL, the start level an observation of R0; a refused fit is reported, not hidden."""
    try:
        fit = fit_curve(
            [0.0, *(point["generated_tokens"] for point in points[1:])],
            [point["pass_rate"] for point in points],
        )
    except FitRefused as refusal:
        return {"identified": False, "verdict": f"no fit: {refusal}"}
    return fit.to_dict() | {"verdict": fit.explain()}


def draw(summary: dict[str, Any], path: Path) -> None:
    """Draw the learning curve; bars are one standard error, and a fitted curve appears only if it is identified."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ReportError("drawing needs matplotlib: pip install 'scalerl-verl[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    millions = [point["generated_tokens"] / 1e6 for point in summary["points"]]
    rates = [point["pass_rate"] for point in summary["points"]]
    start, final, fit = summary["start"], summary["final"], summary["fit"]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.axhline(start["pass_rate"], color="0.5", linestyle="--", label=f"start {start['pass_rate']:.1%}")
    bars = [point["stderr"] for point in summary["points"]]
    axes.errorbar(millions, rates, bars, fmt="o", color="C0", capsize=3, label="evaluation, ±1 standard error")
    if fit["identified"]:
        grid = [millions[-1] * part / 200 for part in range(201)]
        curve = sigmoid([value * 1e6 for value in grid], fit["A"], fit["B"], fit["C_mid"], fit["R0"])
        axes.plot(grid, curve, color="C1", label=f"sigmoid fit, ceiling {fit['A']:.1%}")
    axes.set_title(f"Held-out pass rate, {start['pass_rate']:.1%} to {final['pass_rate']:.1%}", fontsize=14)
    axes.set_xlabel("generated tokens (millions)", fontsize=12)
    axes.set_ylabel(f"pass rate on {start['num_problems']} held-out problems", fontsize=12)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.set_xlim(left=-0.02 * millions[-1])
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def describe(summary: dict[str, Any]) -> str:
    """Return a few lines for someone who has never seen the recipe."""
    start, final = summary["start"], summary["final"]
    lines = [
        f"Held-out pass rate: {start['pass_rate']:.1%} ± {100 * start['stderr']:.1f} points before training, "
        f"{final['pass_rate']:.1%} ± {100 * final['stderr']:.1f} points after {summary['steps']} steps "
        f"({summary['generated_tokens'] / 1e6:.2f} million generated tokens).",
        f"Gain: {100 * summary['gain']:+.1f} ± {100 * summary['gain_stderr']:.1f} points (one standard error); "
        + ("the error bars are clear of each other." if summary["clear"] else "NOT clear of its error bars."),
        f"Curve fit: {summary['fit']['verdict']}",
    ]
    if summary["wall_s"] is not None:
        lines.append(f"Wall time: {summary['wall_s']:.0f} s.")
    if summary["peak_gib"] is not None:
        lines.append(f"Peak memory: {summary['peak_gib']:.1f} GiB.")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Report a quickstart run: learning_curve.png and summary.json.")
    parser.add_argument("--run-dir", type=Path, required=True, help="holds metrics.jsonl and validation/")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--wall-seconds", type=float, help="wall time of the run, copied into the summary")
    parser.add_argument("--peak-gib", type=float, help="peak memory of the run, copied into the summary")
    parser.add_argument("--seed", type=int, help="seed of the run, copied into the summary")
    options = parser.parse_args(arguments)
    accept_any_text()
    try:
        summary = summarise(
            read_evaluations(options.run_dir),
            read_generated_tokens(options.run_dir),
            options.wall_seconds,
            options.peak_gib,
            options.seed,
        )
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        print(describe(summary))
        draw(summary, options.out / "learning_curve.png")
    except ReportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"Written: {options.out / 'learning_curve.png'}, {options.out / 'summary.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
