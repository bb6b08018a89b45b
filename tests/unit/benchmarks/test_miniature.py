# SPDX-License-Identifier: Apache-2.0
"""The stacked miniature computes what transformers and verl compute."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.miniature import bench, rollout, runs, studies, train
from benchmarks.miniature import recipe as recipes
from benchmarks.miniature.model import StackedModels
from recipes.quickstart import model as quickstart

BUDGET = "++algorithm.scalerl.interruption.thinking_budget=[10,12]"
SMALL = quickstart.Size(32, 64, 2, 2, 16)


@pytest.fixture(scope="module")
def tokenizer():
    return quickstart.build_tokenizer()


@pytest.fixture(scope="module")
def models(tokenizer):
    """Two of one small shape."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(quickstart.SIZES, "small", SMALL)
        for seed in (0, 1):
            torch.manual_seed(seed)
            made.append(quickstart.build_model(tokenizer, "small").eval())
    return made


def _prompts(tokenizer) -> list[list[list[int]]]:
    texts = (["<|user|>7+5-3<|assistant|>", "<|user|>1+2<|assistant|>"], ["<|user|>9-4<|assistant|>"] * 2)
    return [[tokenizer.encode(text, add_special_tokens=False) for text in row] for row in texts]


def test_logits_are_those_of_transformers(tokenizer, models) -> None:
    """FP32 sums in another order: 1e-4 of logits of size 1 to 10."""
    tokens = torch.randint(7, len(tokenizer), (2, 3, 9), generator=torch.Generator().manual_seed(0))
    stacked = StackedModels(models)
    hidden = stacked.hidden(tokens)
    logits = stacked.logits(hidden.flatten(1, 2)).view(2, 3, 9, -1)
    for m, model in enumerate(models):
        torch.testing.assert_close(logits[m], model(tokens[m]).logits, atol=1e-4, rtol=1e-4)


def test_sampled_log_probs_are_those_that_training_computes(tokenizer, models) -> None:
    """Token by token with a cache, and all at once; injected tokens and the prompt have mask 0 and log-prob 0."""
    stacked = StackedModels(models)
    limits = rollout.Limits(12, (3, 3), 2)
    sampled = rollout.generate(
        stacked, _prompts(tokenizer), 64, limits, rollout.Vocabulary.of(tokenizer), torch.Generator().manual_seed(0)
    )
    tokens, mask = sampled.tokens_MNT, sampled.mask_MNT
    M, N, T = tokens.shape
    hidden = stacked.hidden(tokens.clamp(min=0)).flatten(1, 2)
    logp = stacked.logits(hidden).log_softmax(-1).view(M, N, T, -1)[:, :, :-1]
    picked = logp.gather(-1, tokens.clamp(min=0)[:, :, 1:, None])[..., 0]
    torch.testing.assert_close(sampled.logp_MNT[:, :, 1:][mask[:, :, 1:]], picked[mask[:, :, 1:]], atol=1e-4, rtol=1e-4)
    assert (sampled.logp_MNT[~mask] == 0).all()
    position = torch.arange(T)
    assert not mask[position.expand(M, N, T) < sampled.first_MN[..., None]].any()
    assert mask.sum(2).min() >= 1 and mask.sum(2).max() <= 12


def test_rounded_head_is_the_farther_from_training_the_larger_its_offset(tokenizer, models) -> None:
    """What the generator records is log-probs of logits that bf16 has rounded; an offset alone changes no policy."""
    stacked, distances = StackedModels(models), []
    for offset in (None, 0.0, 64.0):
        sampled = rollout.generate(
            stacked, _prompts(tokenizer), 64, rollout.Limits(12), rollout.Vocabulary.of(tokenizer),
            torch.Generator().manual_seed(0), offset,
        )  # fmt: skip
        tokens, mask = sampled.tokens_MNT, sampled.mask_MNT[:, :, 1:]
        M, N, T = tokens.shape
        logits = stacked.logits(stacked.hidden(tokens.clamp(min=0)).flatten(1, 2)).view(M, N, T, -1)[:, :, :-1]
        picked = logits.log_softmax(-1).gather(-1, tokens.clamp(min=0)[:, :, 1:, None])[..., 0]
        distances.append(float((sampled.logp_MNT[:, :, 1:] - picked)[mask].abs().mean()))
    exact, rounded, coarse = distances
    assert exact < 1e-5 < rounded and 10 * rounded < coarse < 0.5


def test_thinking_is_interrupted_at_its_budget(tokenizer, models) -> None:
    """A random model opens a thinking now and then; where it is open at the budget, </think> follows, not sampled."""
    vocabulary = rollout.Vocabulary.of(tokenizer)
    sampled = rollout.generate(
        StackedModels(models),
        _prompts(tokenizer),
        512,
        rollout.Limits(12, (6, 6), 2),
        vocabulary,
        torch.Generator().manual_seed(0),
    )
    assert sampled.interrupted_MN.any()
    for m, n in sampled.interrupted_MN.nonzero().tolist():
        at = int(sampled.first_MN[m, n]) + 6
        row, mask = sampled.tokens_MNT[m, n].tolist(), sampled.mask_MNT[m, n].tolist()
        assert row[at] == vocabulary.think_end and not mask[at]
        assert vocabulary.think_start in row[at - 6 : at] and vocabulary.think_end not in row[at - 6 : at]
        assert 1 <= sum(mask[at + 1 :]) <= 2


def test_advantages_of_a_baseline_are_those_of_verls_estimator() -> None:
    """verl's registry has the row by row form, the miniature calls the vectorised one."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    recipe = recipes.make_recipe("grpo", ["grpo"], (), 1)
    rng = np.random.default_rng(0)
    rewards = rng.choice([-1.0, 1.0], 64)
    mask = torch.as_tensor(rng.random((64, 5)) < 0.7)
    mask[:, 0] = True
    found, kept = recipe.advantages(rewards, mask)
    rewards_BT = torch.zeros(64, 5)
    rewards_BT[:, -1] = torch.as_tensor(rewards)
    groups = np.repeat(np.arange(4), 16)
    expected, _ = get_adv_estimator_fn("grpo")(rewards_BT, mask.float(), groups)
    torch.testing.assert_close(found, expected)
    assert kept.all()


def _objective(name: str, rewards_PG, mask_PGT, old_PGT, new_PGT) -> torch.Tensor:
    """Of a recipe, from its paper, prompt by prompt."""
    centred = rewards_PG - rewards_PG.mean(1, keepdim=True)
    kept = rewards_PG.std(1) > 0
    ratio, lengths = (new_PGT - old_PGT).exp(), mask_PGT.sum(2)
    if name == "scalerl":
        advantages = (centred / centred[kept].square().mean().sqrt())[..., None]
        token = ratio.detach().clamp(max=5) * advantages * new_PGT
        return -((token * mask_PGT).sum((1, 2)) / lengths.sum(1))[kept].mean()
    advantages = (centred / (rewards_PG.std(1, keepdim=True) + 1e-6))[..., None]
    low, high = {"grpo": (0.8, 1.2), "dapo": (0.8, 1.26), "gspo": (0.997, 1.004)}[name]
    if name == "gspo":
        ratio = (((new_PGT - old_PGT) * mask_PGT).sum(2) / lengths).exp()[..., None]
    token = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if name == "dapo":
        return -((token * mask_PGT).sum((1, 2)) / lengths.sum(1)).mean()
    return -((token * mask_PGT).sum(2) / lengths).mean()


@pytest.mark.parametrize("name", ["scalerl", "grpo", "dapo", "gspo"])
def test_gradient_is_that_of_the_objective(name: str) -> None:
    """Advantages, row weights and loss together; one prompt has equal rewards, responses have all lengths."""
    P, G, T = 6, 16, 9
    preset, overrides = bench.RECIPES[name]
    recipe = recipes.make_recipe(name, [preset], overrides, 8)
    generator = torch.Generator().manual_seed(1)
    rewards = np.random.default_rng(1).choice([-1.0, 1.0], P * G)
    rewards[:G] = 1
    mask = torch.arange(T) < torch.randint(1, T + 1, (P * G, 1), generator=generator)
    old = -2 * torch.rand(P * G, T, generator=generator)
    shift = 0.3 * torch.randn(P * G, T, generator=generator)
    shift[G:, 0] += 2  # beyond the cap of 5, for some
    new = (old + shift).requires_grad_()
    advantages, _ = recipe.advantages(rewards, mask)
    counts = {"batch_num_tokens": int(mask.sum()), "global_batch_size": P * G}
    loss, _ = recipe.loss(old, new, advantages, mask, counts)
    parts = (part.view(P, G, T) for part in (mask, old, new))
    expected = _objective(name, torch.as_tensor(rewards, dtype=torch.float32).view(P, G), *parts)
    found, wanted = (torch.autograd.grad(value, new)[0] for value in (loss, expected))
    torch.testing.assert_close(found, wanted, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("name", ["scalerl", "dapo", "gspo"])
def test_loss_does_not_depend_on_chunks(name: str) -> None:
    preset, overrides = bench.RECIPES[name]
    recipe = recipes.make_recipe(name, [preset], overrides, 1)
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(32, 6, generator=generator) < 0.8
    old, new, advantages = (torch.randn(32, 6, generator=generator) * 0.1 for _ in range(3))
    counts = {"batch_num_tokens": int(mask.sum()), "global_batch_size": 32}
    whole, _ = recipe.loss(old, new, advantages, mask, counts)
    halves = [
        recipe.loss(old[rows], new[rows], advantages[rows], mask[rows], counts)[0]
        for rows in (slice(0, 13), slice(13, 32))
    ]
    torch.testing.assert_close(sum(halves), whole)


def test_dynamic_sampling_counts_what_it_passed_over(tokenizer, models) -> None:
    """A batch of prompts with mixed rewards only, and the tokens of the others are paid for."""
    recipe = recipes.make_recipe(
        "dapo", ["dapo"], ("data.train_batch_size=8", "actor_rollout_ref.rollout.n=4", "data.max_response_length=8"), 1
    )
    prompts = [train.Problem(tuple(row), "9") for row in _prompts(tokenizer)[0]] * 8
    flips = iter(np.random.default_rng(0).random(100_000) < 0.2)
    trainer = train.Trainer(
        StackedModels(models),
        recipe,
        rollout.Vocabulary.of(tokenizer),
        [prompts, prompts],
        prompts[:2],
        lambda text, answer: bool(next(flips)),
        10_000,
        [0, 1],
    )
    batch = trainer.sample_batch()
    for m in range(2):
        assert batch.rewards[m].shape == (32,)
        assert (np.abs(batch.rewards[m].reshape(8, 4).mean(1)) < 1).all()
        assert batch.sampled_tokens[m] > int(batch.mask_MNT[m].sum())
        assert trainer.batch_metrics[m]["scalerl/data/prompts_sum"] > 8


def test_a_recipe_learns(tokenizer, models) -> None:
    """Whatever a response says is right if it is short: the pass rate rises."""
    sizes = ("data.train_batch_size=4", "actor_rollout_ref.rollout.n=8", "data.max_response_length=20")
    overrides = (*bench.INTERRUPTION, BUDGET, "actor_rollout_ref.actor.optim.lr=1e-2", *sizes)
    recipe = recipes.make_recipe("scalerl", ["recipe"], overrides, 2)
    prompts = [train.Problem(tuple(row), "") for row in _prompts(tokenizer)[0]] * 8
    trainer = train.Trainer(
        StackedModels(models),
        recipe,
        rollout.Vocabulary.of(tokenizer),
        [prompts, prompts],
        prompts[:2] * 8,
        lambda text, answer: len(text) < 8 or "</think>" in text[:12],
        10_000,
        [0, 1],
    )
    lines = list(trainer.run(16, 16))
    for before, after in zip(*lines, strict=True):
        assert after["scalerl/validation/pass_rate"] > before["scalerl/validation/pass_rate"] + 0.2
        assert after["scalerl/compute/generated_tokens"] > 0
        assert after["actor/grad_norm"] > 0 and after["actor/log_ratio"] > 0 and 0 <= after["actor/clipped"] < 0.5
        assert "actor/log_ratio" not in before


def _trainer(tokenizer, models, chunk_tokens: int, num_updates: int = 2):
    """Of the whole recipe, on random grades."""
    sizes = ("data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "data.max_response_length=12")
    recipe = recipes.make_recipe("scalerl", ["recipe"], (*bench.INTERRUPTION, BUDGET, *sizes), num_updates)
    prompts = [train.Problem(tuple(row), "9") for row in _prompts(tokenizer)[0]] * 8
    flips = np.random.default_rng(0)
    return train.Trainer(
        StackedModels(models),
        recipe,
        rollout.Vocabulary.of(tokenizer),
        [prompts, prompts],
        prompts[:2],
        lambda text, answer: bool(flips.random() < 0.5),
        chunk_tokens,
        [0, 1],
    )


def test_validation_under_other_limits_stands_beside_the_recipes_own(tokenizer, models) -> None:
    """Grades that depend on the limits alone; afterwards sampling goes on under the recipe's."""
    trainer = _trainer(tokenizer, models, 10_000)
    assert "scalerl/validation/pass_rate_other_limits" not in trainer.validate()[0]
    trainer.other_limits, own = rollout.Limits(12), trainer.limits
    seen = []

    def sample(problems, repeat, limits=None):
        seen.append(limits or trainer.limits)
        return None, [np.full(8, 1.0 if seen[-1] is own else -1.0)] * 2

    trainer.sample = sample
    line = trainer.validate()[1]
    assert (line["scalerl/validation/pass_rate"], line["scalerl/validation/pass_rate_other_limits"]) == (1.0, 0.0)
    assert seen == [own, rollout.Limits(12)] and trainer.limits is own


def test_gradient_does_not_depend_on_chunks(tokenizer, models) -> None:
    """Denominators are those of the mini-batch, in whatever parts it passes through the network."""
    gradients = []
    for chunk_tokens in (10_000, 100):
        trainer = _trainer(tokenizer, models, chunk_tokens)
        batch = trainer.sample_batch()
        trainer._step = lambda: [0.0, 0.0]
        trainer._update(batch, trainer._prepare(batch), slice(0, 16))
        gradients.append([p.grad for p in trainer.models.parameters()])
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients[0])
    for whole, parts in zip(*gradients, strict=True):
        torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-3)  # FP32 sums in another order


def test_optimizer_steps_share_a_batch_and_leave_its_policy(tokenizer, models) -> None:
    """Each row once, ratios against the log-probs of sampling, the learning rate warmed up from 0, step by step."""
    trainer = _trainer(tokenizer, models, 10_000, num_updates=4)
    parts, shifts, rates = [], [], []
    update, loss, step = trainer._update, trainer.recipe.loss, trainer._step

    def watch_loss(old, logp, advantages, mask, counts):
        shifts.append(float((logp - old)[mask].abs().max().detach()))
        return loss(old, logp, advantages, mask, counts)

    def watch_step() -> list[float]:
        norms = step()
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        return norms

    trainer._update = lambda batch, advantages, rows: (parts.append(rows), update(batch, advantages, rows))
    trainer._step = watch_step
    object.__setattr__(trainer.recipe, "loss", watch_loss)
    list(trainer.run(4, 4))
    assert [(part.start, part.stop) for part in parts] == [(0, 16), (16, 32), (32, 48), (48, 64)]
    assert rates == pytest.approx([0, trainer.lr / 3, trainer.lr * 2 / 3, trainer.lr])
    # two models a step: the first two steps see the policy that sampled (the first trains at 0), the others do not
    assert max(shifts[:4]) < 1e-4 and min(shifts[4:]) > 1e-3


def test_each_model_is_clipped_by_its_own_norm(tokenizer, models) -> None:
    trainer = _trainer(tokenizer, models, 10_000)
    generator = torch.Generator().manual_seed(0)
    for p in trainer.models.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
        p.grad[1] *= 1e-4
    before = [p.grad.clone() for p in trainer.models.parameters()]
    norms = [float(torch.cat([grad[m].flatten() for grad in before]).norm()) for m in range(2)]
    assert norms[0] > trainer.max_norm > norms[1]
    trainer._step()
    for p, old in zip(trainer.models.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad[0], old[0] * trainer.max_norm / norms[0])
        torch.testing.assert_close(p.grad[1], old[1])


def test_mastered_problems_leave_from_the_second_epoch_on() -> None:
    """And never so many that fewer than a batch are left."""
    recipe = recipes.make_recipe("scalerl", ["recipe"], ("data.train_batch_size=2",), 1)
    epochs = train.Epochs([train.Problem((number,), "") for number in range(4)], recipe, 0)
    for key, problem in epochs.draw(4):
        epochs.record(key, 0, 16 if problem.prompt[0] < 1 else 8, 16)
    assert {problem.prompt[0] for _, problem in epochs.draw(3)} == {1, 2, 3}
    assert epochs.num_dropped == 1


@pytest.mark.parametrize(("updates", "note"), [(16, None), (32, "ended before its last update")])
def test_a_run_becomes_a_row_that_says_if_it_was_cut_off(tmp_path: Path, updates: int, note: str | None) -> None:
    facts = {"impl": "grpo", "case": {"k": 1}, "facts": {"commit": "c"}, "updates": updates}
    (tmp_path / "grpo.k1.facts.json").write_text(json.dumps(facts))
    line = '{"step": 16, "data": {"scalerl/compute/steps": 16, "scalerl/validation/pass_rate": 0.51234}}'
    (tmp_path / "grpo.k1.seed3.jsonl").write_text(line + "\n")
    (row,) = bench.recorded_rows(tmp_path)
    assert row["case"] == {"k": 1, "seed": 3} and row["commit"] == "c" and row.get("note") == note
    assert row["points"]["updates"] == [16] and row["points"]["pass_rate"] == [0.5123]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--k 0", "--k 0: a generated batch makes at least 1 optimizer step"),
        ("--k 7 --updates 8", "--updates 8 must be a multiple of --k 7"),
        ("--validate-every 12", "--validate-every 12 must be a multiple of --k 8"),
        ("--updates 0", "--updates 0 must be a multiple"),
        ("--train-problems 100", "--train-problems 100 are fewer than a batch has, 256"),
        ("--test-problems 1", "--test-problems 1 have no standard error"),
        ("--lr -1", "--lr -1 must be above 0"),
        ("--head-offset 64", "--head-offset changes what a recipe is: name the --study"),
        ("--recipe grpo --suffix .there", "grpo.there.facts.json exists: give another --out or --suffix"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str, message: str
) -> None:
    (tmp_path / "grpo.there.facts.json").write_text("{}")
    monkeypatch.setattr("sys.argv", ["bench", "--warm", str(tmp_path), "--out", str(tmp_path), *given.split()])
    with pytest.raises(SystemExit):
        bench.main()
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["grpo.there.facts.json"]


def test_runs_of_a_study_are_for_no_other_table() -> None:
    case = {"size": "0.3M", "k": 8, "train_problems": 2048, "test_problems": 1000, "seed": 0}
    rows = [
        {"impl": "grpo", "hardware": "a card", "case": {**case, **more}, "points": {"tokens": [0, tokens]}}
        for more, tokens in (({}, 5), ({"study": "head", "head_offset": 64.0}, 9))
    ]
    assert runs.select_rows(rows, runs.Group())["grpo"][0]["points"]["tokens"] == [0, 5]


def test_only_new_runs_that_got_beyond_their_start_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="no runs there; give what was --out"):
        bench.new_rows(tmp_path)
    facts = {"impl": "grpo", "case": {"k": 1}, "facts": {"commit": "c"}, "updates": 16}
    (tmp_path / "grpo.facts.json").write_text(json.dumps(facts))
    line = '{"step": %d, "data": {"scalerl/compute/steps": %d, "scalerl/validation/pass_rate": 0.5}}\n'
    (tmp_path / "grpo.seed3.jsonl").write_text(line % (0, 0))
    with pytest.raises(ValueError, match="grpo of seed 3 has not got beyond its start"):
        bench.new_rows(tmp_path)
    (tmp_path / "grpo.seed3.jsonl").write_text(line % (0, 0) + line % (16, 16))
    (made,) = bench.new_rows(tmp_path)
    monkeypatch.setattr(bench, "read_rows", lambda name: [made])
    with pytest.raises(ValueError, match="grpo of seed 3 is recorded already"):
        bench.new_rows(tmp_path)


def test_a_run_through_verl_that_was_cut_off_says_where(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "data": {"timing_s/step": 2.0}}\n{"step": 2, "data": {"timing_s/step": 3.0}}\n')
    from benchmarks.evidence import record as evidence

    whole = evidence.row_of("a", path, {}, {"seed": 0, "steps": 2})
    assert "note" not in whole and whole["points"]["step_s"] == [2, 3]
    assert evidence.row_of("a", path, {"note": "busy"}, {"seed": 0, "steps": 3})["note"] == "busy; ended at step 2 of 3"


def test_recorded_runs_that_were_cut_off_are_marked() -> None:
    """As recorded, against the number of updates in the command that made them."""
    rows = bench.read_rows("miniature")
    assert rows
    for row in rows:
        words = row["command"].split()
        asked = int(words[words.index("--updates") + 1])
        assert (row["points"]["updates"][-1] < asked) == (row.get("note") == bench.ENDED), row["run_id"]


def test_recorded_runs_of_a_seed_have_one_warm_start() -> None:
    """Before training, recipes differ by sampling and by how overlong responses end (.01); seeds differ by .04."""
    starts: dict[tuple, list[float]] = {}
    for row in bench.read_rows("miniature"):
        key = (row["case"]["size"], row["case"]["seed"], row["case"].get("both_ways"))
        starts.setdefault(key, []).append(row["points"]["pass_rate"][0])
    assert len(starts) >= 8
    apart = {key: max(rates) - min(rates) for key, rates in starts.items()}
    assert {key: gap for key, gap in apart.items() if gap > 0.05} == {}


@pytest.mark.parametrize("study", studies.STUDIES)
def test_every_run_of_a_study_is_accepted_and_has_files_of_its_own(
    study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, dict[str, object]] = {}

    def start(name: str, arguments: argparse.Namespace) -> None:
        started[f"{name}{arguments.suffix}"] = vars(arguments)

    monkeypatch.setattr(bench, "run", start)
    monkeypatch.setattr(bench, "find_seeds", lambda warm, seeds: [0])
    for name in studies.STUDIES[study].runs:
        line = studies.command(study, name, tmp_path, ["--warm", "warm/3M"])
        monkeypatch.setattr("sys.argv", line[2:])
        assert bench.main() == 0
    assert list(started) == list(studies.STUDIES[study].runs)
    assert {given["study"] for given in started.values()} == {study}


def test_a_study_leaves_out_what_is_there_and_ends_with_what_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = studies.STUDIES["head"].runs
    (tmp_path / f"{first}.facts.json").touch()
    begun: list[str] = []

    def fail(line: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        begun.append(line[line.index("--recipe") + 1] + line[line.index("--suffix") + 1])
        return subprocess.CompletedProcess(line, 7)

    monkeypatch.setattr(studies.subprocess, "run", fail)
    assert studies.run_study("head", tmp_path, [], seconds=60, jobs=1) == 7
    assert begun == [second]
    assert studies.run_study("head", tmp_path, [], seconds=-1, jobs=2) == 0
    assert begun == [second]
