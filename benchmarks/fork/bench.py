# SPDX-License-Identifier: Apache-2.0
"""A rare fork: where runs end under each loss, for several numbers of optimizer steps on a generated batch.

    python -m benchmarks.fork.bench --record                 64 seeds, 512 steps, as recorded
    python -m benchmarks.fork.bench --seeds 4 --updates 64

Written down before the recorded runs: at k = 8 the losses end alike; at k = 32 four in five of CISPO's seeds learn to
think, and one in twenty of the clip's.

The policy is one of tables (benchmarks/fork/policy.py), all seeds side by side. Advantages, row weights and losses are
the functions that verl would call, of presets composed as verl composes them.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.fork.policy import ForkPolicy, Responses, Task
from benchmarks.miniature.bench import VANILLA
from benchmarks.miniature.recipe import Recipe, make_recipe
from benchmarks.rows import append_rows, run_facts

BENCH = "fork"
STEPS = (8, 32, 64)
"""Optimizer steps on a generated batch."""
RATES = (0.1, 0.03, 0.3)
"""Learning rates: a table's logits have to move by several units."""
LOSSES: dict[str, tuple[str, ...]] = {
    "cispo": (),
    "clip": VANILLA,
    "clip_higher": (*VANILLA, "actor_rollout_ref.actor.clip_ratio_high=0.28"),
}
PROMPTS, BETAS, WARMUP = 8, (0.9, 0.95), 3
"""Prompts of an optimizer step; Adam's betas, and its steps of warm-up."""
THINKS = 0.5
"""A seed has learnt to think if more than this share of its responses thinks at the end."""


class Run:
    """All seeds of one loss and number of steps.

    Args:
        recipe: what trains them.
        task: what they meet.
        num_seeds: M.
        seed: of everything that is drawn.
        rate: learning rate.
    """

    def __init__(self, recipe: Recipe, task: Task, num_seeds: int, seed: int, rate: float) -> None:
        self.rate, self.recipe, self.generator = rate, recipe, torch.Generator().manual_seed(seed)
        self.policy = ForkPolicy(task, num_seeds, self.generator)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=rate, betas=BETAS, eps=1e-15)
        self.clipped: list[float] = []
        self.log_ratios: list[float] = []
        self.updates = 0

    def train(self, num_updates: int) -> Iterator[Tensor]:
        """Pass rate of each seed, [M], at the start and after every generated batch."""
        yield self.policy.pass_rates()[0]
        while self.updates < num_updates:
            k, size = self.recipe.num_updates, PROMPTS * self.recipe.group
            batch = self.policy.sample(k * PROMPTS, self.recipe.group, self.generator)
            old = self.policy.log_probs(batch).detach()
            advantages = self._advantages(batch)
            for part in (slice(size * i, size * (i + 1)) for i in range(k)):
                self._update(batch.part(part), old[:, part], advantages[:, part])
            yield self.policy.pass_rates()[0]

    def _advantages(self, batch: Responses) -> Tensor:
        """With row weights, [M, N, T]."""
        found = [
            self.recipe.advantages(rewards.double().numpy(), mask)[0]
            for rewards, mask in zip(batch.reward_MN, batch.mask_MNT, strict=True)
        ]
        return torch.stack(found)

    def _update(self, batch: Responses, old: Tensor, advantages: Tensor) -> None:
        """One optimizer step on these rows of every seed.

        Rows are weighted already, and a loss sums them over the rows of one seed: that of all rows is the seeds' sum.
        """
        log_probs = self.policy.log_probs(batch)
        parts = (part.flatten(0, 1) for part in (old, log_probs, advantages, batch.mask_MNT))
        counts = {"batch_num_tokens": int(batch.mask_MNT.sum()), "global_batch_size": old.shape[1]}
        total, measured = self.recipe.loss(*parts, counts)
        self.clipped.append(float(measured["clipped"]))
        self.log_ratios.append(float((log_probs.detach() - old)[batch.mask_MNT].abs().mean()))
        self.optimizer.zero_grad()
        total.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, self.updates / WARMUP)
        self.optimizer.step()
        self.updates += 1


def measure(name: str, k: int, rate: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """The row of one loss, number of steps and learning rate, without the facts of the run."""
    task = Task()
    run = Run(make_recipe(name, ["recipe"], LOSSES[name], k), task, arguments.seeds, arguments.seed, rate)
    began = time.perf_counter()
    curve = list(run.train(arguments.updates))
    _, share = run.policy.pass_rates()
    case = {"k": k, "updates": run.updates, "prompts": PROMPTS, "group": run.recipe.group, "lr": rate, **vars(task)}
    points = {
        "updates": [i * k for i in range(len(curve))], "pass_rate": [_rounded(rates.mean()) for rates in curve],
        "ends": [_rounded(rate) for rate in curve[-1]], "thinks": [_rounded(part) for part in share],
        "clipped": _rounded(statistics.fmean(run.clipped)), "log_ratio": _rounded(statistics.fmean(run.log_ratios)),
    }  # fmt: skip
    num = sum(part > THINKS for part in points["thinks"])
    seconds = time.perf_counter() - began
    end = points["pass_rate"][-1]
    print(f"lr={rate} k={k} {name}: ends at {end:.3f}, {num} of {arguments.seeds} think; {seconds:.0f} s", flush=True)
    return {"impl": name, "metric": "curve", "unit": "pass rate", "case": case, "points": points}


def _rounded(value: float | Tensor) -> float:
    return round(float(value), 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=512, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates (default: %(default)s)")
    parser.add_argument("--record", action="store_true", help="append rows to benchmarks/results/fork.jsonl")
    arguments = parser.parse_args()
    if arguments.seeds < 2 or arguments.updates < 1 or arguments.updates % max(STEPS):
        parser.error(
            f"--seeds {arguments.seeds} --updates {arguments.updates}: give 2 seeds or more, and a multiple of "
            f"{max(STEPS)} optimizer steps"
        )
    facts = run_facts(f"seed{arguments.seed}")
    torch.set_num_threads(1)
    cases = itertools.product(arguments.rates, STEPS, LOSSES)
    rows = [{**facts, **measure(name, k, rate, arguments)} for rate, k, name in cases]
    if arguments.record:
        print(append_rows(BENCH, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
