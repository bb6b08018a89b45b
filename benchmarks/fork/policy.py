# SPDX-License-Identifier: Apache-2.0
"""A policy of tables whose pass rate is known exactly: it guesses, or it thinks in steps that it can learn.

The first token of a response decides. A guess is right with a fixed probability, which nothing can raise. Thinking
takes further tokens, each of which uses one of a number of skills; it is right if all of them are. At first thinking is
right less often than a guess, so that what unlearns it before the skills are there ends at the guess.

Shape legend: M models, N responses a model, D kinds of prompts, S skills, L steps of thinking, T = 1 + L tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class Task:
    """Sizes and where training starts.

    Args:
        kinds: of prompts; each has a probability of its own to think.
        skills: there are so many, each with a probability of its own to succeed.
        steps: of thinking, each with a skill drawn with equal probability.
        guess: probability that a guess is right.
        thinks: share of responses that think at first.
        thought: probability that thinking is right at first.
    """

    kinds: int = 8
    skills: int = 48
    steps: int = 10
    guess: float = 0.55
    thinks: float = 0.3
    thought: float = 0.08


@dataclass(frozen=True)
class Responses:
    """What was sampled.

    kind_MN, skill_MNL: what each response met. thinks_MN, done_MNL: what it did. mask_MNT: its tokens: one of a guess.
    reward_MN: +1 where it is right, -1 elsewhere.
    """

    kind_MN: Tensor
    skill_MNL: Tensor
    thinks_MN: Tensor
    done_MNL: Tensor
    mask_MNT: Tensor
    reward_MN: Tensor

    def part(self, rows: slice) -> Responses:
        """Some rows of every model."""
        return Responses(*(getattr(self, name)[:, rows] for name in self.__dataclass_fields__))


class ForkPolicy(nn.Module):
    """Logits of M models.

    Args:
        task: what they meet.
        num_models: M.
        generator: draws how they differ: logits have a standard deviation of .3.
    """

    def __init__(self, task: Task, num_models: int, generator: torch.Generator) -> None:
        super().__init__()
        self.task = task
        starts = {"fork": (task.thinks, task.kinds), "skill": (task.thought ** (1 / task.steps), task.skills)}
        for name, (start, size) in starts.items():
            noise = torch.randn(num_models, size, generator=generator)
            setattr(self, name, nn.Parameter(math.log(start / (1 - start)) + 0.3 * noise))

    @torch.no_grad()
    def sample(self, num_prompts: int, group: int, generator: torch.Generator) -> Responses:
        """``group`` responses to each of ``num_prompts`` prompts; those of a prompt stand beside each other."""
        M, N, L = len(self.fork), num_prompts * group, self.task.steps
        kind = torch.randint(self.task.kinds, (M, num_prompts), generator=generator).repeat_interleave(group, 1)
        skill = torch.randint(self.task.skills, (M, num_prompts, L), generator=generator).repeat_interleave(group, 1)
        model = torch.arange(M)[:, None]
        thinks = torch.rand(M, N, generator=generator) < self.fork[model, kind].sigmoid()
        done = torch.rand(M, N, L, generator=generator) < self.skill[model[..., None], skill].sigmoid()
        guessed = torch.rand(M, N, generator=generator) < self.task.guess
        mask = torch.cat([torch.ones(M, N, 1, dtype=torch.bool), thinks[..., None].expand(M, N, L)], -1)
        reward = torch.where(torch.where(thinks, done.all(-1), guessed), 1.0, -1.0)
        return Responses(kind, skill, thinks, done, mask, reward)

    def log_probs(self, responses: Responses) -> Tensor:
        """Of every token, [M, N, T]; those of steps that a guess does not take mean nothing."""
        model = torch.arange(len(self.fork))[:, None]
        fork = self.fork[model, responses.kind_MN]
        skill = self.skill[model[..., None], responses.skill_MNL]
        chosen = torch.where(responses.thinks_MN, fork, -fork)[..., None]
        return logsigmoid(torch.cat([chosen, torch.where(responses.done_MNL, skill, -skill)], -1))

    @torch.no_grad()
    def pass_rates(self) -> tuple[Tensor, Tensor]:
        """Exact, over kinds and skills: pass rate, and the share of responses that think, [M] each.

        Skills of a response are drawn independently: the expectation of a product is the product of expectations.
        """
        share = self.fork.sigmoid().mean(-1)
        thought = self.skill.sigmoid().mean(-1) ** self.task.steps
        return (1 - share) * self.task.guess + share * thought, share
