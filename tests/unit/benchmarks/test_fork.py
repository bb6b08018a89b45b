# SPDX-License-Identifier: Apache-2.0
"""The policy of tables: its exact pass rate, its log-probs, and its training by the losses of presets."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks.fork import bench
from benchmarks.fork.policy import ForkPolicy, Task

TASK = Task(kinds=2, skills=3, steps=2, guess=0.6, thinks=0.4, thought=0.3)


def make_policy(num_models: int = 2) -> tuple[ForkPolicy, torch.Generator]:
    generator = torch.Generator().manual_seed(0)
    return ForkPolicy(TASK, num_models, generator), generator


def test_pass_rate_is_that_of_many_responses() -> None:
    policy, generator = make_policy()
    responses = policy.sample(4000, 10, generator)
    rate, share = policy.pass_rates()
    # Five standard errors of a mean of 40,000 responses, groups of ten of which share their skills.
    torch.testing.assert_close((responses.reward_MN > 0).float().mean(1), rate, rtol=0, atol=5 * 0.5 / 4000**0.5)
    torch.testing.assert_close(responses.thinks_MN.float().mean(1), share, rtol=0, atol=5 * 0.5 / 4000**0.5)


def test_log_probs_are_those_of_what_was_done() -> None:
    policy, generator = make_policy(1)
    responses = policy.sample(3, 4, generator)
    found = policy.log_probs(responses)[0].exp().detach()
    for n in range(12):
        thinks, kind = bool(responses.thinks_MN[0, n]), int(responses.kind_MN[0, n])
        probability = torch.sigmoid(policy.fork[0, kind]).item()
        assert found[n, 0] == pytest.approx(probability if thinks else 1 - probability, rel=1e-5)
        assert responses.mask_MNT[0, n].tolist() == [True, thinks, thinks]
        for step in range(2):
            probability = torch.sigmoid(policy.skill[0, responses.skill_MNL[0, n, step]]).item()
            done = bool(responses.done_MNL[0, n, step])
            assert found[n, 1 + step] == pytest.approx(probability if done else 1 - probability, rel=1e-5)
        right = responses.done_MNL[0, n].all()
        assert not thinks or (responses.reward_MN[0, n] > 0) == right


def test_both_losses_train_the_same_batches_and_only_the_clip_clips() -> None:
    arguments = argparse.Namespace(seeds=2, seed=0, updates=16)
    cispo, clip = (bench.measure(name, 16, 0.1, arguments) for name in ("cispo", "clip"))
    assert cispo["points"]["pass_rate"][0] == clip["points"]["pass_rate"][0] != clip["points"]["pass_rate"][-1]
    assert cispo["points"]["clipped"] < 0.001 < clip["points"]["clipped"]
    assert cispo["points"]["updates"] == [0, 16]


def test_seeds_side_by_side_are_trained_as_if_alone() -> None:
    recipe = bench.make_recipe("clip", ["recipe"], bench.LOSSES["clip"], 2)
    both = bench.Run(recipe, TASK, 2, 0, 0.1)
    batch = both.policy.sample(2 * bench.PROMPTS, recipe.group, both.generator)
    old = both.policy.log_probs(batch).detach() + 0.1
    advantages = both._advantages(batch)
    both._update(batch, old, advantages)
    for m in range(2):
        alone = bench.Run(recipe, TASK, 1, 0, 0.1)
        one = [part[m : m + 1] for part in (old, advantages)]
        with torch.no_grad():
            alone.policy.fork.copy_(make_policy()[0].fork[m : m + 1])
            alone.policy.skill.copy_(make_policy()[0].skill[m : m + 1])
        row = type(batch)(*(getattr(batch, name)[m : m + 1] for name in batch.__dataclass_fields__))
        alone._update(row, *one)
        for name in ("fork", "skill"):
            mine, theirs = getattr(both.policy, name).grad[m], getattr(alone.policy, name).grad[0]
            # The same sums in another order, float32.
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
