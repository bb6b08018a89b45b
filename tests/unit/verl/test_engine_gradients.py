# SPDX-License-Identifier: Apache-2.0
"""The gradient of a real (tiny) model through verl's own engine, for every way of splitting the same batch.

Fault of the field: the same batch split into other micro-batches, ranks or dynamic token budgets gave another loss, or
a gradient scaled by the number of ranks. Here verl's FSDP2 engine, its micro-batching and its ppo_loss run on 1 and 2
gloo ranks, in FP32 and in FP64 (engine_gradients.py says how); the truth is the paper's objective in float64 (arXiv
2510.13786, section 2), without verl and without the package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.quickstart import model as recipe
from tests.unit.verl.rank_updates import CASES
from tests.unit.verl.ranks import run_ranks

CHILD = Path(__file__).with_name("engine_gradients.py")
EPS_MAX = 2.0
LOSSES = ("cap", "range", "sequence", "terms")
TERMS = ("KL", "KL as in verl's scripts", "entropy", "KL in the reward")
"""By themselves, and a KL that is taken off the reward; in FP64."""
TRIED = [*((loss, precision) for loss in LOSSES for precision in ("fp32", "fp64")), *((loss, "fp64") for loss in TERMS)]
KL_COEF, ENTROPY_COEF = 0.3, 0.2
KL_IN_REWARD, GAMMA = 0.3, 0.9
TOLERANCES = {"fp32": 1e-5, "fp64": 1e-6}
"""In "fp64" Hugging Face's model still takes its softmax and norms in FP32 (6e-8 a rounding)."""

Gradients = dict[str, np.ndarray]


def run_engine(folder: Path, world_size: int) -> Gradients:
    run_ranks(CHILD, folder, world_size)
    return dict(np.load(folder / f"gradients-{world_size}.npz"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    tokenizer = recipe.build_tokenizer()
    torch.manual_seed(0)
    recipe.build_model(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def gradients(folder: Path) -> dict[int, Gradients]:
    return {world_size: run_engine(folder, world_size) for world_size in (1, 2)}


def weights_of(ratios: list[float], loss: str) -> list[float]:
    """Weight of each token of a response, by the definition of the loss's options."""
    if loss == "sequence":
        return [min(math.prod(ratios), EPS_MAX)] * len(ratios)
    return [0.0 if loss == "range" and not 0.5 <= rho <= 2.0 else min(rho, EPS_MAX) for rho in ratios]


def objective(
    inputs: Mapping[str, np.ndarray], loss: str, log_probs: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, list[float]]:
    """-J in float64, and the ratios of all tokens.

    Args:
        inputs: as `engine_gradients` writes them.
        loss: one of `LOSSES`.
        log_probs: tokens of a row -> float64 log-probs of all tokens at each position, [T, V].
    """
    uids, rewards, lengths = inputs["uids"].tolist(), inputs["rewards"].tolist(), inputs["lengths"].tolist()
    rows_of = {uid: [i for i, other in enumerate(uids) if other == uid] for uid in dict.fromkeys(uids)}
    rows_of = {uid: rows for uid, rows in rows_of.items() if len({rewards[i] for i in rows}) > 1}
    in_reward = kl_in_reward(inputs) if loss == "KL in the reward" else {}
    centred = {i: rewards[i] - np.mean([rewards[k] for k in rows]) for rows in rows_of.values() for i in rows}
    std = float(np.std(list(centred.values())))
    prompt, ratios, total = int(inputs["prompt"]), [], torch.zeros((), dtype=torch.float64)
    for rows in rows_of.values():
        num_tokens = sum(lengths[i] for i in rows)
        for i in rows:
            tokens = torch.from_numpy(inputs["tokens"][i, : prompt + lengths[i]])
            all_logp = log_probs(tokens)[prompt - 1 : -1]
            logp = all_logp.gather(1, tokens[prompt:, None])[:, 0]
            rollout = torch.from_numpy(inputs["logp"][i, : lengths[i]]).double()
            mine = (logp.detach() - rollout).exp().tolist()
            ratios += mine
            weights = torch.tensor(weights_of(mine, loss), dtype=torch.float64)
            advantages = in_reward.get(i, centred[i] / std if loss in LOSSES else 0.0)
            total = total - (weights * logp * advantages).sum() / num_tokens / len(rows_of)
            ref = rollout / 2 - 2 + rollout.square() / 50
            if loss in ("terms", "KL"):
                total = total + KL_COEF * (logp - ref).square().sum() / 2 / num_tokens / len(rows_of)
            elif loss == "KL as in verl's scripts":  # which bounds it at 10
                kl = ((ref - logp).exp() - (ref - logp) - 1).clamp(max=10.0)
                total = total + KL_COEF * kl.sum() / num_tokens / len(rows_of)
            if loss in ("terms", "entropy"):
                total = total + ENTROPY_COEF * (all_logp.exp() * all_logp).sum() / num_tokens / len(rows_of)
    return total, ratios


def reference_gradient(folder: Path, loss: str) -> tuple[np.ndarray, list[float]]:
    """-dJ/dtheta in float64, and the ratios of all tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager").double()
    inputs = dict(np.load(folder / "inputs.npz"))
    total, ratios = objective(inputs, loss, lambda tokens: model(tokens[None]).logits[0].log_softmax(-1))
    total.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).numpy(), ratios


def kl_in_reward(inputs: Mapping[str, np.ndarray]) -> dict[int, torch.Tensor]:
    """Advantage of each token: the discounted sum of rewards less KL from there on, whitened over all tokens."""
    returns = []
    for logp, length, reward in zip(
        inputs["logp"], inputs["lengths"].tolist(), inputs["rewards"].tolist(), strict=True
    ):
        old, total, found = logp[:length].astype(np.float64), 0.0, []
        rewards = -KL_IN_REWARD * (old - (old / 2 - 2 + old**2 / 50))
        rewards[-1] += reward
        for value in rewards[::-1].tolist():
            total = value + GAMMA * total
            found.append(total)
        returns.append(np.array(found[::-1]))
    every = np.concatenate(returns)
    std = math.sqrt(float(every.var(ddof=1)) + 1e-8)
    return {i: torch.from_numpy((row - every.mean()) / std) for i, row in enumerate(returns)}


def relative_error(found: np.ndarray, truth: np.ndarray) -> float:
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


@pytest.mark.fault("other micro-batches, ranks or token budgets: another loss, or a gradient scaled by the ranks")
@pytest.mark.parametrize(("loss", "precision"), TRIED)
def test_micro_batches_ranks_token_budgets_row_order_and_padding_leave_the_gradient_alone(
    gradients: dict[int, Gradients], loss: str, precision: str
) -> None:
    base = gradients[1][f"{precision}|{loss}|in order|fours"]
    assert base.dtype == {"fp32": np.float32, "fp64": np.float64}[precision]
    errors = {
        f"{world_size} ranks|{name}": relative_error(found, base)
        for world_size, by_name in gradients.items()
        for name, found in by_name.items()
        if name.startswith(f"{precision}|{loss}|")
    }
    assert len(errors) == 30, sorted(errors)
    assert max(errors.values()) < TOLERANCES[precision], errors


@pytest.mark.works_with("KL loss", "CISPO", "prompt average", "advantages")
@pytest.mark.works_with("entropy bonus", "CISPO", "prompt average", "advantages")
@pytest.mark.works_with("KL in the reward", "CISPO", "prompt average")
@pytest.mark.parametrize(("loss", "precision"), TRIED)
def test_gradient_is_that_of_the_paper_s_objective(
    folder: Path, gradients: dict[int, Gradients], loss: str, precision: str
) -> None:
    truth, ratios = reference_gradient(folder, loss)
    assert min(ratios) < 0.5 and max(ratios) > EPS_MAX, "the batch must reach both bounds"
    found = gradients[2][f"{precision}|{loss}|groups apart|pairs"]
    assert relative_error(found, truth) < TOLERANCES[precision]


def test_losses_of_this_test_differ(gradients: dict[int, Gradients]) -> None:
    cap, *others = (gradients[1][f"fp64|{loss}|in order|fours"] for loss in LOSSES)
    assert all(relative_error(other, cap) > 0.01 for other in others)
    terms = [gradients[1][f"fp64|{loss}|in order|fours"] for loss in TERMS]
    assert all(relative_error(one, other) > 0.01 for one, other in combinations(terms, 2))


@pytest.mark.parametrize("case", CASES)
def test_several_updates_on_a_batch_do_not_depend_on_the_number_of_ranks(
    folder: Path, gradients: dict[int, Gradients], case: str
) -> None:
    """Each update sees the same whole prompts on 1 and 2 ranks, all of their rows, and leaves the same weights."""
    found = {
        world: [json.loads((folder / f"updates-{world}-{rank}.json").read_text())[case] for rank in range(world)]
        for world in (1, 2)
    }
    steps = {
        world: [sorted(key for part in parts for key in part if key[0] == "p" and key[:3] != "pad") for parts in ranks]
        for world, ranks in (
            (world, list(zip(*(steps for steps, _ in parts), strict=True))) for world, parts in found.items()
        )
    }
    assert steps[1] == steps[2]
    prompts = [{key.split("_")[0] for key in step} for step in steps[2]]
    assert [len(names) for names in prompts] == {"unequal groups": [3, 3, 3]}.get(case, [3, 3, 2])
    assert sum(map(len, prompts)) == len(set().union(*prompts))
    sizes, outputs, _ = CASES[case]
    assert all(
        len(step) == outputs * sum(sizes[int(name[1:])] for name in names)
        for step, names in zip(steps[2], prompts, strict=True)
    )
    assert all(len({len(rank[number]) for rank, _ in found[2]}) == 1 for number in range(len(prompts)))
    weights = {world: dict(np.load(folder / f"weights-{world}.npz")) for world in (1, 2)}
    moved = {world: found[case] - found["start"] for world, found in weights.items()}
    assert np.abs(moved[1]).max() > 1e-3 and relative_error(moved[2], moved[1]) < TOLERANCES["fp64"]
    metrics = [{name: value for name, value in parts[0][1].items() if "ess" not in name} for parts in found.values()]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5) and metrics[0]["scalerl/data/skipped_updates_sum"] == 1.0
