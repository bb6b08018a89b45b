# SPDX-License-Identifier: Apache-2.0
"""Recipes on stacked tiny models: as many seeds at once as needed to tell recipes apart.

python -m benchmarks.miniature.bench --warm outputs/warm/0.34M --recipe scalerl --out curves --updates 256
python -m benchmarks.miniature.bench --list

No verl trainer, no vLLM: one process, sampling and training by the same network (benchmarks/miniature/). Presets
are composed as verl composes them, and advantages, weights and losses are the functions that verl would call. Prompts
are the quickstart's; --warm holds a folder a seed, as recipes/quickstart/prepare.py writes them. Writes
OUT/<recipe>.seed<N>.jsonl, which `scalerl fit --x tokens` reads. --record OUT puts them into benchmarks/results, and
--curves DIR writes those again as CSV for `scalerl fit` and `scalerl compare`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.miniature.runs import BENCH, FEW, Group, read_group
from benchmarks.rows import append_rows, describe_gpu, read_rows, run_facts
from scalerl_verl.json_lines import read_records

PROMPTS_A_STEP = 32
"""Of an optimizer step, in the presets."""
INTERRUPTION = (
    "++algorithm.scalerl.interruption.thinking_budget=[36,40]",
    "++algorithm.scalerl.interruption.answer_budget=6",
)
VANILLA = (
    "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla",
    "~actor_rollout_ref.actor.policy_loss.eps_max",
)
NO_INTERRUPTION = ("actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent",)
RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "scalerl": ("recipe", INTERRUPTION),
    "grpo": ("grpo", ()),
    "dapo": ("dapo", ()),
    "gspo": ("gspo", ()),
    "no_loss": ("recipe", (*INTERRUPTION, *VANILLA)),
    "no_prompt_average": ("recipe", (*INTERRUPTION, "actor_rollout_ref.actor.loss_agg_mode=token-mean")),
    "no_batch_normalisation": ("recipe", (*INTERRUPTION, "algorithm.scalerl.adv_norm=prompt")),
    "no_zero_variance_filtering": ("recipe", (*INTERRUPTION, "algorithm.scalerl.zero_variance=keep")),
    "no_positive_resampling_off": ("recipe", (*INTERRUPTION, "~data.sampler")),
    "no_forced_interruption": ("recipe", NO_INTERRUPTION),
    "eps_max_1": ("recipe", (*INTERRUPTION, "actor_rollout_ref.actor.policy_loss.eps_max=1")),
    "eps_max_none": ("recipe", (*INTERRUPTION, "actor_rollout_ref.actor.policy_loss.eps_max=1e9")),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", action="append", choices=RECIPES, help="one after the other (default: all)")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--warm", type=Path, help="warm-started models, a folder a seed")
    parser.add_argument("--seeds", type=int, nargs="*", help="default: all folders of --warm")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--k", type=int, default=8, help="optimizer steps a generated batch (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=256, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--validate-every", type=int, default=16, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--train-problems", type=int, default=FEW, help="of every seed (default: %(default)s)")
    parser.add_argument(
        "--test-problems", type=int, default=1000, help="held out, the same for all seeds (default: %(default)s)"
    )
    parser.add_argument("--lr", type=float, help="default: the preset's")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        default=300_000,
        help="positions in a forward pass, of all seeds (default: %(default)s)",
    )
    parser.add_argument(
        "--both-ways", action="store_true", help="validate interrupted as well as cut; such runs are for no other table"
    )
    parser.add_argument(
        "--head-offset", type=float, help="generate with logits rounded to bf16, this number on top of them"
    )
    parser.add_argument("--study", help="a name for runs that are compared among themselves and are for no other table")
    parser.add_argument("--suffix", default="", help="of the names of results")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which a recipe is ended")
    parser.add_argument("--record", type=Path, help="folder of runs: their rows go to the results that tables show")
    parser.add_argument("--curves", type=Path, help="write the recorded curves there, as CSV")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(RECIPES))
        return 0
    if arguments.record:
        try:
            rows = new_rows(arguments.record)
        except ValueError as error:
            parser.error(str(error))
        print(f"{append_rows(BENCH, rows)}: {len(rows)} rows more")
        return 0
    if arguments.curves:
        write_curves(arguments.curves)
        return 0
    if not (arguments.warm and arguments.out):
        parser.error("--warm and --out are needed")
    try:
        check(arguments)
        arguments.seeds = find_seeds(arguments.warm, arguments.seeds)
    except ValueError as error:
        parser.error(str(error))
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.recipe or RECIPES:
        run(name, arguments)
    return 0


def check(arguments: argparse.Namespace) -> None:
    """Refuse what would fail or mislead later.

    Raises:
        ValueError: a size that does not fit the others, a device that is not there, results in the way.
    """
    k, prompts = arguments.k, PROMPTS_A_STEP
    if k < 1:
        raise ValueError(f"--k {k}: a generated batch makes at least 1 optimizer step")
    for name in ("updates", "validate_every"):
        value = getattr(arguments, name)
        if value < 1 or value % k:
            raise ValueError(
                f"--{name.replace('_', '-')} {value} must be a multiple of --k {k}: whole batches are made"
            )
    if arguments.train_problems < k * prompts:
        raise ValueError(f"--train-problems {arguments.train_problems} are fewer than a batch has, {k * prompts}")
    if arguments.test_problems < 2:
        raise ValueError(f"--test-problems {arguments.test_problems} have no standard error; give 2 or more")
    if arguments.lr is not None and arguments.lr <= 0:
        raise ValueError(f"--lr {arguments.lr:g} must be above 0")
    if arguments.head_offset is not None and not arguments.study:
        raise ValueError("--head-offset changes what a recipe is: name the --study that such runs belong to")
    if arguments.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError(f"--device cuda: torch {torch.__version__} finds no GPU; use --device cpu")
    for name in arguments.recipe or RECIPES:
        if (there := arguments.out / f"{name}{arguments.suffix}.facts.json").exists():
            raise ValueError(f"{there} exists: give another --out or --suffix, or remove {name}{arguments.suffix}.*")


def find_seeds(warm: Path, asked: Sequence[int] | None) -> list[int]:
    """The seeds to run: those asked for, or all that have a warm-started model.

    Raises:
        ValueError: a seed asked for has no model, or there is none at all.
    """
    there = sorted(int(path.parent.parent.name) for path in warm.glob("*/model/config.json") if _is_seed(path))
    missing = [seed for seed in asked or [] if seed not in there]
    if there and not missing:
        return list(asked) if asked else there
    wanted = f"--seeds {' '.join(map(str, asked))}" if asked else "all seeds"
    found = f"models of seeds {', '.join(map(str, there))}" if there else "no warm-started model"
    first = missing[0] if missing else 0
    raise ValueError(
        f"--warm {warm} holds {found}, and {wanted} were asked for; expected is SEED/model for each of them. Make one: "
        f"python recipes/quickstart/prepare.py --out {warm / str(first)} --seed {first} --eval-problems 1000"
    )


def _is_seed(config: Path) -> bool:
    return config.parent.parent.name.isdigit()


def run(name: str, arguments: argparse.Namespace) -> None:
    """All seeds of one recipe."""
    import torch
    from transformers import Qwen3ForCausalLM

    from benchmarks.miniature.model import StackedModels
    from benchmarks.miniature.recipe import make_recipe
    from benchmarks.miniature.rollout import Vocabulary
    from benchmarks.miniature.train import Problem, Trainer, as_line, limits_of
    from recipes.quickstart.model import build_tokenizer, format_prompt
    from recipes.quickstart.task import grade, sample_problems

    seeds = arguments.seeds
    tokenizer = build_tokenizer()

    def encode(problem) -> Problem:
        ids = tokenizer.encode(format_prompt(tokenizer, problem.text), add_special_tokens=False)
        return Problem(tuple(ids), str(problem.answer))

    preset, overrides = RECIPES[name]
    if arguments.lr:
        overrides = (*overrides, f"actor_rollout_ref.actor.optim.lr={arguments.lr}")
    recipe = make_recipe(name, [preset], overrides, arguments.k)
    other = None
    if arguments.both_ways:
        preset, overrides = RECIPES["grpo" if recipe.interrupts else "scalerl"]
        other = limits_of(make_recipe("other", [preset], overrides, arguments.k))
    models = StackedModels(
        [Qwen3ForCausalLM.from_pretrained(arguments.warm / str(s) / "model", dtype=torch.float32) for s in seeds]
    )
    trainer = Trainer(
        models.to(arguments.device),
        recipe,
        Vocabulary.of(tokenizer),
        [[encode(p) for p in sample_problems(s, arguments.train_problems, False, True)] for s in seeds],
        [encode(p) for p in sample_problems(0, arguments.test_problems, True, True)],
        grade,
        arguments.chunk_tokens,
        seeds,
        other,
        arguments.head_offset,
    )
    facts = run_facts(f"{name}{arguments.suffix}") | (describe_gpu() if arguments.device == "cuda" else {})
    case = {"size": arguments.warm.name, "k": arguments.k, "train_problems": arguments.train_problems}
    case |= {"test_problems": arguments.test_problems, "lr": trainer.lr}
    if arguments.both_ways:
        case["both_ways"] = True
    if arguments.study:
        case |= {"study": arguments.study, "head_offset": arguments.head_offset}
    stored = json.dumps({"impl": name, "case": case, "facts": facts, "updates": arguments.updates})
    (arguments.out / f"{name}{arguments.suffix}.facts.json").write_text(stored, encoding="utf-8")
    files = [(arguments.out / f"{name}{arguments.suffix}.seed{s}.jsonl").open("w", encoding="utf-8") for s in seeds]
    began = time.time()
    for lines in trainer.run(arguments.updates, arguments.validate_every):
        for file, data in zip(files, lines, strict=True):
            file.write(json.dumps(as_line(trainer.updates, data)) + "\n")
            file.flush()
        rates = " ".join(f"{data['scalerl/validation/pass_rate']:.3f}" for data in lines)
        print(f"{name}{arguments.suffix} {trainer.updates} {time.time() - began:.0f}s {rates}", flush=True)
        if time.time() - began > arguments.seconds:
            break


POINTS = {
    "updates": "scalerl/compute/steps",
    "tokens": "scalerl/compute/generated_tokens",
    "pass_rate": "scalerl/validation/pass_rate",
    "stderr": "scalerl/validation/stderr",
    "pass_rate_other_limits": "scalerl/validation/pass_rate_other_limits",
    "length": "response_length/mean",
    "prompts": "scalerl/data/prompts_sum",
    "kept_fraction": "scalerl/data/kept_fraction",
    "dropped": "scalerl/data/curriculum_dropped",
    "clipped": "actor/clipped",
    "log_ratio": "actor/log_ratio",
    "grad_norm": "actor/grad_norm",
}


ENDED = "ended before its last update"


def new_rows(folder: Path) -> list[dict]:
    """`recorded_rows`, none of which is recorded already.

    Raises:
        ValueError: there are no runs, one has nothing but its start, or one is recorded.
    """
    rows = recorded_rows(folder)
    if not rows:
        raise ValueError(f"--record {folder}: no runs there; give what was --out")
    recorded = read_rows(BENCH)
    for row in rows:
        name = f"{row['impl']} of seed {row['case']['seed']}"
        if len(row["points"]["updates"]) < 2:
            raise ValueError(f"--record {folder}: {name} has not got beyond its start")
        if any(old["case"] == row["case"] and old["points"] == row["points"] for old in recorded):
            raise ValueError(f"--record {folder}: {name} is recorded already")
    return rows


def recorded_rows(folder: Path) -> list[dict]:
    """A row a run, its curve under ``points``; one that was cut off has a note that says so."""
    rows = []
    for path in sorted(folder.glob("*.facts.json")):
        stored = json.loads(path.read_text(encoding="utf-8"))
        stem = path.name.removesuffix(".facts.json")
        for curve in sorted(folder.glob(f"{stem}.seed*.jsonl")):
            lines = [record["data"] for record in read_records(curve)]
            points = {name: [_rounded(data.get(key)) for data in lines] for name, key in POINTS.items()}
            points = {name: values for name, values in points.items() if any(value is not None for value in values)}
            case = {**stored["case"], "seed": int(curve.stem.rpartition("seed")[2])}
            row = {"impl": stored["impl"], "metric": "curve", "unit": "pass rate", "case": case, "points": points}
            if points["updates"][-1] < stored["updates"]:
                row["note"] = ENDED
            rows.append({**stored["facts"], **row})
    return rows


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def write_curves(folder: Path) -> None:
    """``GROUP/RECIPE.seedN.csv`` of the runs that the tables show, without the first point, which cost nothing.

    GROUP is ``SIZE.kK``, with another number of training problems than the default ``SIZE.kK.PROBLEMS``.
    """
    for group in dict.fromkeys(Group.of(row["case"]) for row in read_rows(BENCH)):
        (folder / group.folder).mkdir(parents=True, exist_ok=True)
        for name, found in read_group(group).items():
            for seed, row in found.items():
                points = row["points"]
                lines = zip(points["tokens"], points["pass_rate"], points["stderr"], strict=True)
                text = "".join(f"{tokens},{score},{error}\n" for tokens, score, error in lines if tokens > 0)
                (folder / group.folder / f"{name}.seed{seed}.csv").write_text(
                    "compute,score,stderr\n" + text, encoding="utf-8"
                )


if __name__ == "__main__":
    sys.exit(main())
