# SPDX-License-Identifier: Apache-2.0
"""The pieces composed against the paper's objective, written out in NumPy from arXiv 2510.13786, section 2.

    J = 1/P sum_x 1/(sum_g |y_g|) sum_i sum_t sg(min(rho_it, eps_max)) * Ahat_i * log pi_train(y_it)

over the P prompts whose rewards differ. The hand-computed batch: prompt a with rewards 1, -1 and 1, 2 tokens; prompt b
with rewards 1, 1 (dropped); ratios 1, log-probabilities -1.

    A = 1, -1; std 1; J = (1 * -1 - 1 * -2) / 3 = 1/3, so the loss is -1/3
"""

import numpy as np
import pytest
import torch

from scalerl_verl.advantage import row_weights, scalerl_advantages
from scalerl_verl.loss import aggregate_loss, cispo_token_loss


def reference_j(
    rewards: list[float], prompts: list[str], train: list[list[float]], rollout: list[list[float]], eps_max: float
) -> tuple[float, list[list[float]]]:
    """J and dJ / dlog pi_train with loops over Python floats; shares no code with the package."""
    rows_of: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        if train[i]:
            rows_of.setdefault(prompt, []).append(i)
    rows_of = {x: rows for x, rows in rows_of.items() if len({rewards[i] for i in rows}) > 1}
    centred = {i: rewards[i] - np.mean([rewards[k] for k in rows]) for rows in rows_of.values() for i in rows}
    std = float(np.std(list(centred.values()))) if centred else 1.0
    j, grad = 0.0, [[0.0] * len(tokens) for tokens in train]
    for rows in rows_of.values():
        tokens = sum(len(train[i]) for i in rows)
        for i in rows:
            for t, (logp, logq) in enumerate(zip(train[i], rollout[i], strict=True)):
                slope = min(float(np.exp(logp - logq)), eps_max) * centred[i] / std / tokens / len(rows_of)
                j += slope * logp
                grad[i][t] = slope
    return j, grad


def composed_loss(
    rewards: list[float],
    prompts: list[str],
    train: list[list[float]],
    rollout: list[list[float]],
    eps_max: float,
    num_padding: int = 0,
) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss, gradient and mask of the package's pieces on the padded batch."""
    num_rows, width = len(rewards) + num_padding, max(map(len, train)) + 2
    logp_BT = torch.full((num_rows, width), float("nan"), dtype=torch.float64)
    rollout_BT, mask_BT = logp_BT.clone(), torch.zeros(num_rows, width, dtype=torch.bool)
    for i, (logp, logq) in enumerate(zip(train, rollout, strict=True)):
        logp_BT[i, : len(logp)] = torch.tensor(logp, dtype=torch.float64)
        rollout_BT[i, : len(logq)] = torch.tensor(logq, dtype=torch.float64)
        mask_BT[i, : len(logp)] = True
    num_tokens_B = mask_BT.sum(-1).numpy()
    rewards_B = np.array(rewards + [np.nan] * num_padding)
    # Padding rows of verl copy a real row, its prompt's id included.
    ids_B = np.array(prompts + [prompts[0]] * num_padding, dtype=object)
    trains_B = num_tokens_B > 0
    result = scalerl_advantages(rewards_B, ids_B, trains_B, adv_norm="batch", zero_variance="drop")
    weights_B = row_weights("prompt-mean", num_tokens_B, ids_B, result.kept_B, num_rows=num_rows, trains_B=trains_B)
    advantages_BT = torch.from_numpy(result.advantages_B * weights_B)[:, None].expand(num_rows, width)
    logp_BT.requires_grad_()
    loss_BT = cispo_token_loss(logp_BT, rollout_BT, advantages_BT, mask_BT, eps_max)
    loss = aggregate_loss(loss_BT, mask_BT, "prompt-mean", global_batch_size=num_rows)
    loss.backward()
    return float(loss.detach()), logp_BT.grad.numpy(), mask_BT.numpy()


def test_hand_computed_batch():
    ones = [[-1.0], [-1.0, -1.0], [-1.0], [-1.0]]
    args = [1.0, -1.0, 1.0, 1.0], ["a", "a", "b", "b"], ones, ones, 5.0
    assert reference_j(*args)[0] == pytest.approx(1 / 3)
    assert composed_loss(*args)[0] == pytest.approx(-1 / 3)


@pytest.mark.parametrize("seed", range(25))
def test_composition_equals_the_objective_of_the_paper(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 7, size=rng.integers(2, 7))
    prompts = [f"x{p}" for p, size in enumerate(sizes) for _ in range(size)]
    pass_rates = rng.choice([0.0, 0.5, 1.0], size=sizes.size)
    rewards = [1.0 if rng.random() < pass_rates[p] else -1.0 for p, size in enumerate(sizes) for _ in range(size)]
    order = rng.permutation(len(prompts)).tolist()
    prompts, rewards = [prompts[i] for i in order], [rewards[i] for i in order]
    lengths = rng.integers(0, 10, size=len(prompts))
    train = [(-3 * rng.random(n)).tolist() for n in lengths]
    rollout = [(-3 * rng.random(n)).tolist() for n in lengths]
    if not max(lengths):
        train[0], rollout[0] = [-1.0], [-2.0]

    j, grad = reference_j(rewards, prompts, train, rollout, 2.0)
    loss, grad_BT, mask_BT = composed_loss(rewards, prompts, train, rollout, 2.0, num_padding=seed % 4)
    assert loss == pytest.approx(-j, rel=1e-9, abs=1e-12)
    for i, row in enumerate(grad):
        np.testing.assert_allclose(grad_BT[i, : len(row)], -np.array(row), rtol=1e-9, atol=1e-12)
    assert not grad_BT[~mask_BT].any()


def test_random_batches_exercise_truncation_and_dropping():
    """Guards the test above: with nothing dropped or truncated it would prove less than it says."""
    args = [1.0, -1.0, 1.0, 1.0], ["a", "a", "b", "b"], [[-1.0], [-1.0, -0.1], [-1.0], [-1.0]]
    rollout = [[-3.0], [-1.0, -3.0], [-1.0], [-1.0]]
    assert reference_j(*args, rollout, 2.0)[0] != reference_j(*args, rollout, 9.0)[0]
    assert reference_j(*args, rollout, 2.0)[1][2] == [0.0]
