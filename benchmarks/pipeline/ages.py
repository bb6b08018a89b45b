# SPDX-License-Identifier: Apache-2.0
"""The log-ratio of trainer and generator by the age of the tokens, in a real run of PipelineRL-k on the CPU.

python recipes/quickstart/prepare.py --out DATA
python -m benchmarks.pipeline.ages --data DATA --work OUT --lead full      run, and record its rows
python -m benchmarks.pipeline.ages --from OUT --lead full      rows of a run that is there; reads its metrics.jsonl
python -m benchmarks.pipeline.ages                             draw docs/ages.png of the runs recorded last

The run is the quickstart's model and task in FP32, with the learning rate of the quickstart. With `lead=full`
generation runs as far ahead as k allows, with `adaptive` as little as keeps the trainer busy. A row has the percentiles
of a metric over the steps in which it was reported. The first steps, in which the learning rate rises and the lead is
built up, count for the engines alone.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.launching import ONLY_STEPS, environment, log_tail, new_run_id, read_steps, run_verl
from benchmarks.rows import REPO, append_rows, read_rows, run_facts
from recipes.launch.command import RECIPES, RECIPES_ENV

BENCH = "ages"
PICTURE = REPO / "docs" / "ages.png"
ENGINES = "engines"
_SQUARE = re.compile(r"scalerl/mismatch/(engines|age_\d+)/log_ratio_square_mean")
K, STEPS, FIRST, PROMPTS, GROUP = 8, 60, 12, 16, 8
MIN_BATCHES = 5
"""In which an age has to be for the picture: few tokens have the ages that few batches hold."""
SECONDS = 1500
"""After which a run is ended: several times what it takes on two cores that nobody shares."""
LEADS = ("full", "adaptive")
CASE = {"k": K, "kv_on_update": "keep", "prompts": PROMPTS, "group": GROUP, "lr": 5e-4}


def overrides(data: Path, folder: Path, lead: str) -> list[str]:
    """The whole command line of the run."""
    return [
        "--config-dir",
        str(RECIPES),
        "+scalerl=[pipeline]",
        "+quickstart=config",
        *ONLY_STEPS,
        "trainer.experiment_name=ages",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.default_local_dir={folder}/checkpoints",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/test.parquet",
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.model.path={data}/model",
        f"actor_rollout_ref.actor.optim.lr={CASE['lr']}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={PROMPTS * GROUP}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={PROMPTS * GROUP}",
        f"actor_rollout_ref.rollout.n={GROUP}",
        f"trainer.v1.pipeline_rl.max_staleness={K}",
        f"trainer.v1.pipeline_rl.lead={lead}",
        f"trainer.v1.pipeline_rl.kv_on_update={CASE['kv_on_update']}",
        f"++ray_kwargs.ray_init.runtime_env.env_vars.{RECIPES_ENV}={RECIPES}",
    ]


def run(data: Path, folder: Path, lead: str) -> int | None:
    """Run into ``folder``; the exit code, or None if it was ended."""
    folder.mkdir(parents=True, exist_ok=True)
    env = {**environment(folder, new_run_id(), ()), RECIPES_ENV: str(RECIPES)}
    return run_verl(overrides(data, folder, lead), env, folder, STEPS, SECONDS)


def squares_by_group(steps: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Mean square log-ratios of the steps that report them: first the engines', of all steps, then by age, after FIRST.

    Args:
        steps: metrics of each step, in order.

    Raises:
        ValueError: no step reports one.
    """
    found: dict[str, list[float]] = {}
    for number, metrics in enumerate(steps, 1):
        for name, value in metrics.items():
            match = _SQUARE.fullmatch(name)
            if match and (match[1] == ENGINES or number > FIRST):
                found.setdefault(match[1], []).append(value)
    if not found:
        raise ValueError(
            f"no step after {FIRST} reports scalerl/mismatch/age_<age>/log_ratio_square_mean: give a log of "
            "pipeline_rl with more steps"
        )
    return {name: found[name] for name in sorted(found, key=_age)}


def rows_of(squares: dict[str, list[float]], lead: str, num_steps: int, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each group of tokens, in nats squared.

    Args:
        squares: of `squares_by_group`.
        lead: of the run.
        num_steps: of the run.
        facts: of `run_facts`.
    """
    rows = []
    for group, values in squares.items():
        cuts = statistics.quantiles(values, n=5, method="inclusive") if len(values) > 1 else values * 4
        rows.append(
            {
                "case": {**CASE, "lead": lead, "group_of_tokens": group, "steps": num_steps, "batches": len(values)},
                "impl": "pipeline_rl",
                "metric": "log_ratio_square_mean",
                "p20": cuts[0],
                "p50": statistics.median(values),
                "p80": cuts[3],
                "unit": "nat^2",
                "peak_gib": None,
                **facts,
            }
        )
    return rows


def newest_of_each_lead(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Lead -> rows of the run recorded last with it."""
    newest = {row["case"]["lead"]: row["run_id"] for row in rows}
    return {lead: [row for row in rows if row["run_id"] == newest[lead]] for lead in LEADS if lead in newest}


def draw(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Medians over batches, with bars from the 20th to the 80th percentile.

    Args:
        runs: of `newest_of_each_lead`.
        path: of the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    engines = []
    for index, (lead, rows) in enumerate(runs.items()):
        ages_seen = [row for row in rows if row["case"]["group_of_tokens"] != ENGINES]
        by_age = [row for row in ages_seen if row["case"]["batches"] >= MIN_BATCHES]
        engines += [row["p50"] for row in rows if row["case"]["group_of_tokens"] == ENGINES]
        medians = [row["p50"] for row in by_age]
        bars = [[row["p50"] - row["p20"] for row in by_age], [row["p80"] - row["p50"] for row in by_age]]
        ages = [_age(row["case"]["group_of_tokens"]) for row in by_age]
        axes.errorbar(ages, medians, bars, marker="os"[index], capsize=3, color=f"C{index}", label=f"lead={lead}")
    case = next(iter(runs.values()))[0]["case"]
    axes.set_title(f"PipelineRL-{case['k']} on the quickstart's task: log-ratio by age", fontsize=12.5)
    axes.set_xlim(-0.3, case["k"] + 0.3)
    axes.set_xticks(range(case["k"] + 1))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("age of the tokens (versions)", fontsize=12)
    axes.set_ylabel("mean square log-ratio (nat²)", fontsize=12)
    axes.grid(alpha=0.3)
    if engines:
        label = f"engines alone: {max(engines):.1g} nat²"
        axes.plot(0, max(engines), marker="D", color="C3", clip_on=False, linestyle="", label=label)
    axes.legend(fontsize=10, loc="upper left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _age(group: str) -> int:
    return -1 if group == ENGINES else int(group.removeprefix("age_"))


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="of recipes/quickstart/prepare.py: run on it")
    parser.add_argument("--work", type=Path, default=Path("outputs/ages"), help="of the run, default %(default)s")
    parser.add_argument("--lead", choices=LEADS, default="full", help="of the run, default %(default)s")
    parser.add_argument("--from", dest="done", type=Path, help="folder of a run whose rows are to be recorded")
    parser.add_argument("--out", type=Path, default=PICTURE, help="of the picture, default docs/ages.png")
    options = parser.parse_args(argv)
    folder = options.done
    if options.data:
        folder = options.work.resolve()
        if (code := run(options.data.resolve(), folder, options.lead)) != 0:
            print(f"error: the run ended with {code}\n{log_tail(folder)}", file=sys.stderr)
            return 1
    if folder:
        steps = [step.metrics for step in read_steps(folder)]
        append_rows(BENCH, rows_of(squares_by_group(steps), options.lead, len(steps), run_facts(uuid.uuid4().hex[:12])))
    draw(newest_of_each_lead(read_rows(BENCH)), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
