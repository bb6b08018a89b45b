# SPDX-License-Identifier: Apache-2.0
"""Recipes on stacked tiny models: as many seeds at once as needed to tell recipes apart.

python benchmarks/bench_miniature.py --warm outputs/warm/0.34M --recipe scalerl --out curves --updates 256
python benchmarks/bench_miniature.py --list

No verl trainer, no vLLM: one process, sampling and training by the same network (benchmarks/miniature_*.py). Presets
are composed as verl composes them, and advantages, weights and losses are the functions that verl would call. Prompts
are the quickstart's; --warm holds a folder a seed, as recipes/quickstart/prepare.py writes them. Writes
OUT/<recipe>.seed<N>.jsonl, which `scalerl fit --x tokens` reads.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from rows import REPO

sys.path[:0] = [str(REPO), str(REPO / "recipes" / "quickstart")]

PIECES = ["actor_rollout_ref.model.use_fused_kernels=False"]
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
    parser.add_argument("--recipe", action="append", choices=RECIPES, help="one after the other; default: all")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--warm", type=Path, help="warm-started models, a folder a seed")
    parser.add_argument("--seeds", type=int, nargs="*", help="default: all folders")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--k", type=int, default=8, help="optimizer steps a generated batch")
    parser.add_argument("--updates", type=int, default=256)
    parser.add_argument("--validate-every", type=int, default=16)
    parser.add_argument("--train-problems", type=int, default=2048)
    parser.add_argument("--test-problems", type=int, default=1000)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--chunk-tokens", type=int, default=300_000)
    parser.add_argument("--suffix", default="", help="of the names of results")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which a recipe is ended")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(RECIPES))
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.recipe or RECIPES:
        run(name, arguments)
    return 0


def run(name: str, arguments: argparse.Namespace) -> None:
    """All seeds of one recipe."""
    import torch
    from miniature_model import StackedModels
    from miniature_recipe import make_recipe
    from miniature_rollout import Vocabulary
    from miniature_train import Problem, Trainer, as_line
    from model import build_tokenizer, format_prompt
    from task import grade, sample_problems
    from transformers import Qwen3ForCausalLM

    seeds = arguments.seeds or sorted(int(path.name) for path in arguments.warm.iterdir() if path.name.isdigit())
    tokenizer = build_tokenizer()

    def encode(problem) -> Problem:
        ids = tokenizer.encode(format_prompt(tokenizer, problem.text), add_special_tokens=False)
        return Problem(tuple(ids), str(problem.answer))

    preset, overrides = RECIPES[name]
    if arguments.lr:
        overrides = (*overrides, f"actor_rollout_ref.actor.optim.lr={arguments.lr}")
    recipe = make_recipe(name, [preset], overrides, arguments.k)
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
    )
    files = [(arguments.out / f"{name}{arguments.suffix}.seed{s}.jsonl").open("w") for s in seeds]
    began = time.time()
    for lines in trainer.run(arguments.updates, arguments.validate_every):
        for file, data in zip(files, lines, strict=True):
            file.write(json.dumps(as_line(trainer.updates, data)) + "\n")
            file.flush()
        rates = " ".join(f"{data['scalerl/validation/pass_rate']:.3f}" for data in lines)
        print(f"{name}{arguments.suffix} {trainer.updates} {time.time() - began:.0f}s {rates}", flush=True)
        if time.time() - began > arguments.seconds:
            break


if __name__ == "__main__":
    sys.exit(main())
