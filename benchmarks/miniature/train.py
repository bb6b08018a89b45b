# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of stacked models: batches, optimizer steps, validation.

Shape legend: M models, N responses a model, T positions.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.miniature.model import StackedModels
from benchmarks.miniature.recipe import Recipe
from benchmarks.miniature.rollout import Limits, Responses, Vocabulary, generate
from scalerl_verl.curriculum.history import PassHistory
from scalerl_verl.curriculum.rules import choose_drops


@dataclass(frozen=True)
class Problem:
    """A prompt's token ids and its right answer."""

    prompt: tuple[int, ...]
    answer: str


class Epochs:
    """Problems of one seed in a new order every epoch, without those mastered if the recipe says so."""

    def __init__(self, problems: Sequence[Problem], recipe: Recipe, seed: int) -> None:
        self._active = {str(i): problem for i, problem in enumerate(problems)}
        self._recipe, self._rng = recipe, random.Random(f"epochs/{seed}")
        self._history, self._epoch, self._queue = PassHistory(), 0, []
        self.num_dropped = 0

    def draw(self, num: int) -> list[tuple[str, Problem]]:
        """The next problems; an epoch ends within a batch if it must."""
        drawn = []
        while len(drawn) < num:
            if not self._queue:
                self._begin()
            drawn.append(self._queue.pop())
        return drawn

    def record(self, key: str, step: int, passed: int, responses: int) -> None:
        """Results of a problem that was drawn in batch ``step``."""
        self._history.record(key, step, passed, responses)

    def _begin(self) -> None:
        self._epoch += 1
        rules = self._recipe.rules
        if rules is not None and self._epoch >= rules.first_epoch:
            for dropped in choose_drops(self._active, self._history, rules)[0]:
                del self._active[dropped.prompt_id]
                self.num_dropped += 1
        self._queue = list(self._active.items())
        self._rng.shuffle(self._queue)


def limits_of(recipe: Recipe) -> Limits:
    """Lengths of a recipe's responses."""
    response = int(recipe.config.data.max_response_length)
    if not recipe.interrupts:
        return Limits(response)
    ours = recipe.config.algorithm.scalerl.interruption
    return Limits(response, tuple(ours.thinking_budget), int(ours.answer_budget))


@dataclass
class Batch:
    """What is trained on: rows of every model, groups beside each other, and what sampling them has cost."""

    tokens_MNT: Tensor
    logp_MNT: Tensor
    mask_MNT: Tensor
    rewards: list[np.ndarray]
    sampled_tokens: list[int]
    metrics: list[dict[str, float]] = field(default_factory=list)


@dataclass
class Trainer:
    """Runs of one recipe, a seed each.

    Args:
        models: one a seed.
        recipe: what trains them.
        vocabulary: of the tokenizer.
        train: problems of every seed.
        test: held-out problems, the same for all.
        grade: (response text, answer) -> right.
        chunk_tokens: positions in a forward pass, of all models together.
        seeds: of the data's order.
        other_limits: of lengths, under which the held-out problems are sampled and graded a second time.
        head_offset: of the head that generates what is trained on (`generate`); validation is FP32 always.
    """

    models: StackedModels
    recipe: Recipe
    vocabulary: Vocabulary
    train: Sequence[Sequence[Problem]]
    test: Sequence[Problem]
    grade: Callable[[str, str], bool]
    chunk_tokens: int
    seeds: Sequence[int]
    other_limits: Limits | None = None
    head_offset: float | None = None

    def __post_init__(self) -> None:
        config = self.recipe.config
        device = self.models.inverse_frequency.device
        self.generator = torch.Generator(device).manual_seed(1000 + self.seeds[0])
        self.epochs = [
            Epochs(problems, self.recipe, seed) for problems, seed in zip(self.train, self.seeds, strict=True)
        ]
        optim = config.actor_rollout_ref.actor.optim
        self.lr, self.warmup = float(optim.lr), int(optim.lr_warmup_steps)
        self.optimizer = torch.optim.AdamW(
            self.models.parameters(),
            self.lr,
            betas=tuple(optim.betas),
            eps=float(optim.override_optimizer_config.eps),
            weight_decay=float(optim.weight_decay),
        )
        self.max_norm = float(config.actor_rollout_ref.actor.grad_clip)
        self.limits = limits_of(self.recipe)
        self.updates = self.batches = 0
        self.generated = [0] * self.models.num_models
        self.batch_metrics: list[dict[str, float]] = [{} for _ in self.seeds]
        self.update_metrics: list[list[dict[str, float]]] = [[] for _ in self.seeds]

    def run(self, num_updates: int, validate_every: int) -> Iterator[list[dict[str, float]]]:
        """Train; yields what each run's log says at step 0 and after every ``validate_every`` optimizer steps."""
        yield self.validate()
        while self.updates < num_updates:
            batch = self.sample_batch()
            size = batch.tokens_MNT.shape[1] // self.recipe.num_updates
            trained = self._prepare(batch)
            for part in range(self.recipe.num_updates):
                self._update(batch, trained, slice(part * size, (part + 1) * size))
            if self.updates % validate_every == 0:
                yield self.validate()

    def sample(
        self,
        problems: Sequence[Sequence[Problem]],
        repeat: int,
        limits: Limits | None = None,
        head_offset: float | None = None,
    ) -> tuple[Responses, list[np.ndarray]]:
        """Responses to problems of every model, and the rewards of each model's rows, +1 or -1.

        Limits are the recipe's unless given.
        """
        responses = generate(
            self.models,
            [[p.prompt for p in row] for row in problems],
            repeat,
            limits or self.limits,
            self.vocabulary,
            self.generator,
            head_offset,
        )
        rewards = []
        for texts, row in zip(responses.texts(self.vocabulary), problems, strict=True):
            right = [self.grade(text, row[i // repeat].answer) for i, text in enumerate(texts)]
            rewards.append(np.where(right, 1.0, -1.0))
        return responses, rewards

    def validate(self) -> list[dict[str, float]]:
        """Pass rate on the held-out problems, four samples each, and the compute so far."""
        samples = 4
        M = self.models.num_models
        _, rewards = self.sample([self.test] * M, samples)
        others = None
        if self.other_limits is not None:
            _, others = self.sample([self.test] * M, samples, self.other_limits)
        lines = []
        for m, reward in enumerate(rewards):
            rates = ((reward + 1) / 2).reshape(-1, samples).mean(1).tolist()
            lines.append(
                {
                    "scalerl/compute/generated_tokens": self.generated[m],
                    "scalerl/compute/steps": self.updates,
                    "scalerl/validation/pass_rate": statistics.fmean(rates),
                    "scalerl/validation/stderr": statistics.stdev(rates) / len(rates) ** 0.5,
                    "scalerl/validation/num_prompts": len(rates),
                    "scalerl/validation/num_generations": len(reward),
                    **self.batch_metrics[m],
                    **_means(self.update_metrics[m]),
                }
            )
            self.update_metrics[m].clear()
            if others is not None:
                lines[-1]["scalerl/validation/pass_rate_other_limits"] = float((others[m] > 0).mean())
        return lines

    def sample_batch(self) -> Batch:
        """A batch; with dynamic sampling, prompts with equal rewards are passed over until it is full."""
        recipe, M = self.recipe, self.models.num_models
        want, group = recipe.num_prompts, recipe.group
        taken: list[list[tuple[Tensor, Tensor, Tensor, np.ndarray]]] = [[] for _ in range(M)]
        tokens, seen, ask = [0] * M, [0] * M, want
        lengths: list[list[float]] = [[] for _ in range(M)]
        while min(map(len, taken)) < want:
            drawn = [epochs.draw(ask) for epochs in self.epochs]
            problems = [[problem for _, problem in row] for row in drawn]
            responses, rewards = self.sample(problems, group, head_offset=self.head_offset)
            counts = responses.mask_MNT.sum(2).cpu().numpy()
            for m in range(M):
                for i, (key, _) in enumerate(drawn[m]):
                    if len(taken[m]) == want:
                        break  # as verl would have, sampled no further
                    rows = slice(i * group, (i + 1) * group)
                    reward = rewards[m][rows]
                    tokens[m] += int(counts[m][rows].sum())
                    seen[m] += 1
                    lengths[m].append(float(counts[m][rows].mean()))
                    self.epochs[m].record(key, self.batches, int((reward > 0).sum()), group)
                    if recipe.refills and abs(reward.mean()) == 1:
                        continue
                    parts = (responses.tokens_MNT, responses.logp_MNT, responses.mask_MNT)
                    taken[m].append((*(part[m, rows] for part in parts), reward))
            missing = want - min(map(len, taken))
            ask = max(8, int(missing * 1.3) + 1)
        batch = Batch(
            *(_pad([[row[part] for row in rows] for rows in taken], fill) for part, fill in ((0, -1), (1, 0), (2, 0))),
            [np.concatenate([row[3] for row in rows]) for rows in taken],
            tokens,
        )
        for m in range(M):
            self.generated[m] += tokens[m]
            self.batch_metrics[m] = {
                "critic/score/mean": float(batch.rewards[m].mean()),
                "response_length/mean": statistics.fmean(lengths[m]),
                "scalerl/data/prompts_sum": seen[m],
                "scalerl/data/curriculum_dropped": self.epochs[m].num_dropped,
            }
        self.batches += 1
        return batch

    def _prepare(self, batch: Batch) -> Tensor:
        """Advantages with row weights, [M, N, T]."""
        rows = []
        for m, rewards in enumerate(batch.rewards):
            advantages_BT, kept_B = self.recipe.advantages(rewards, batch.mask_MNT[m])
            self.batch_metrics[m]["scalerl/data/kept_fraction"] = float(kept_B.mean())
            rows.append(advantages_BT)
        return torch.stack(rows)

    def _update(self, batch: Batch, advantages_MNT: Tensor, rows: slice) -> None:
        """One optimizer step on these rows of every model."""
        tokens, old, mask, advantages = (
            part[:, rows] for part in (batch.tokens_MNT, batch.logp_MNT, batch.mask_MNT, advantages_MNT)
        )
        M, N, _ = tokens.shape
        used = int((tokens >= 0).any(0).any(0).nonzero().max()) + 1
        tokens, old, mask, advantages = (part[:, :, :used] for part in (tokens, old, mask, advantages))
        num_tokens = mask.sum((1, 2)).tolist()
        counts = [{"batch_num_tokens": count, "global_batch_size": N} for count in num_tokens]
        chunk = max(1, self.chunk_tokens // (M * used))
        sums: list[dict[str, Tensor]] = [{} for _ in range(M)]  # on the device: a look at it would wait for it
        self.optimizer.zero_grad()
        for start in range(0, N, chunk):
            part = slice(start, start + chunk)
            logp = self._log_probs(tokens[:, part].clamp(min=0))
            total = logp.new_zeros(())
            for m in range(M):
                valid = mask[m, part, 1:]
                loss, measured = self.recipe.loss(old[m, part, 1:], logp[m], advantages[m, part, 1:], valid, counts[m])
                total = total + loss
                distance = (logp[m].detach() - old[m, part, 1:])[valid].abs().sum()
                parts = {name: value * valid.sum() for name, value in measured.items()} | {"log_ratio": distance}
                sums[m] = {name: value + sums[m].get(name, 0) for name, value in parts.items()}
            total.backward()
        norms = self._step()
        for m in range(M):
            means = {name: float(value) / max(1, num_tokens[m]) for name, value in sums[m].items()}
            found = {**means, "grad_norm": norms[m]}
            self.update_metrics[m].append({f"actor/{name}": value for name, value in found.items()})

    def _log_probs(self, tokens_MNT: Tensor) -> Tensor:
        """Of every token but the first, given those before, [M, N, T - 1]."""
        M, N, T = tokens_MNT.shape
        hidden = self.models.hidden(tokens_MNT)[:, :, :-1].reshape(M, N * (T - 1), -1)
        log_probs = self.models.logits(hidden).log_softmax(-1).view(M, N, T - 1, -1)
        return log_probs.gather(-1, tokens_MNT[:, :, 1:, None])[..., 0]

    def _step(self) -> list[float]:
        """Clip each model's gradient by its own norm, then step; warm-up as verl's scheduler has it, from 0.

        Returns:
            The norms.
        """
        parameters = [p for p in self.models.parameters() if p.grad is not None]
        squares = sum(p.grad.flatten(1).square().sum(1) for p in parameters)
        norm_M = torch.sqrt(squares)
        scale_M = (self.max_norm / (norm_M + 1e-6)).clamp(max=1.0)
        for p in parameters:
            p.grad.mul_(scale_M.view(-1, *[1] * (p.dim() - 1)))
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, self.updates / max(1, self.warmup))
        self.optimizer.step()
        self.updates += 1
        return norm_M.tolist()


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each metric over the optimizer steps since the last validation."""
    return {name: statistics.fmean(row[name] for row in rows) for name in (rows[0] if rows else ())}


def _pad(parts: Sequence[Sequence[Tensor]], fill: int) -> Tensor:
    """Groups of rows of every model, [M][P] of [G, T], as one tensor [M, P*G, T] of the greatest T."""
    longest = max(part.shape[1] for row in parts for part in row)
    rows = []
    for row in parts:
        padded = [torch.nn.functional.pad(part, (0, longest - part.shape[1]), value=fill) for part in row]
        rows.append(torch.cat(padded))
    return torch.stack(rows)


def as_line(step: int, data: dict[str, Any]) -> dict[str, Any]:
    """A line of verl's file logger."""
    return {"step": step, "data": data}
