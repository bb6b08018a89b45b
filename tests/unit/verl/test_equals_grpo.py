# SPDX-License-Identifier: Apache-2.0
"""The estimator `scalerl` and verl's GRPO, wherever the two should agree, through verl's own function.

They part by design in two places, which this file accounts for or leaves out: verl divides by the unbiased standard
deviation plus 1e-6, ours by the biased one (in a group of n: a factor sqrt(n / (n - 1)), and an error of 1e-6 / std);
and verl gives the response of a group of one its whole reward as the advantage, ours 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from scalerl_verl.advantage.step import advantage_step
from scalerl_verl.upstream.activation import ACTIVE_ENV
from scalerl_verl.verl import training_step as patches

WIDTH = 5
FP32 = {"rtol": 1e-5, "atol": 2e-6}
"""Means of up to 6 rewards of at most 8 in FP32: a few roundings (6e-8 each) of 8."""


@pytest.fixture(autouse=True)
def checked_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ACTIVE_ENV, "1")


def make_batch(sizes: list[int], outputs: list[int], seed: int) -> tuple[DataProto, list[str]]:
    """Groups of the given sizes; session s has ``outputs[s]`` rows, each with a token; two padding rows at the end."""
    rng = np.random.default_rng(seed)
    rows = []
    for p, size in enumerate(sizes):
        for session in range(size):
            reward = float(rng.choice([-8.0, -1.0, 0.25, 1.0, 8.0]) + rng.integers(0, 3))
            num_outputs = outputs[len(rows) % len(outputs)]
            rows += [(f"p{p}", f"p{p}_{session}_{k}", reward, int(rng.integers(1, WIDTH))) for k in range(num_outputs)]
    rows += [("pad", f"pad_{i}_0", 0.0, 0) for i in range(2)]
    rows = [rows[i] for i in rng.permutation(len(rows))]
    uids, keys, rewards, lengths = zip(*rows, strict=True)
    mask_BT = torch.arange(WIDTH)[None, :] < torch.tensor(lengths)[:, None]
    rewards_BT = torch.zeros(mask_BT.shape)
    rewards_BT[:, -1] = torch.tensor(rewards)
    batch = TensorDict({"response_mask": mask_BT.long(), "token_level_rewards": rewards_BT}, batch_size=len(rows))
    return DataProto(batch=batch, non_tensor_batch={"uid": np.array(uids, dtype=object)}), list(keys)


def theirs(data: DataProto, keys: list[str], divide: bool) -> torch.Tensor:
    result = compute_advantage_for_multi_trajectories(
        data, keys, adv_estimator="grpo", norm_adv_by_std_in_grpo=divide, config=OmegaConf.create({})
    )
    return result.batch["advantages"].clone()


def ours(data: DataProto, keys: list[str], adv_norm: str) -> torch.Tensor:
    """Token-sum has row weights of 1: the advantages as they are."""
    builders = {spec.target: spec.build for spec in patches.SPECS}
    patched = builders["compute_advantage_for_multi_trajectories"](compute_advantage_for_multi_trajectories, None)
    algorithm = {"adv_estimator": "scalerl", "scalerl": {"adv_norm": adv_norm, "zero_variance": "keep"}}
    actor: dict[str, Any] = {"loss_agg_mode": "token-sum", "policy_loss": {"loss_mode": "vanilla"}}
    config = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": {"actor": actor}})
    with advantage_step(config, {}):
        result = patched(data, keys, adv_estimator="scalerl", config=config.algorithm)
    return result.batch["advantages"].clone()


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 6), min_size=1, max_size=4),
    outputs=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    seed=st.integers(0, 10_000),
)
def test_advantages_are_those_of_grpo(sizes: list[int], outputs: list[int], seed: int) -> None:
    data, keys = make_batch(sizes, outputs, seed)
    torch.testing.assert_close(ours(data, keys, "none"), theirs(data, keys, divide=False), **FP32)
    bessel = [1.0 if uid == "pad" else np.sqrt((sizes[int(uid[1:])] - 1) / sizes[int(uid[1:])]) for uid in _uids(data)]
    by_group = ours(data, keys, "prompt") * torch.tensor(bessel, dtype=torch.float32)[:, None]
    # The smallest spread of these rewards is 0.25 in 6: a std above 0.1, so verl's 1e-6 is 1e-5 of an advantage.
    torch.testing.assert_close(by_group, theirs(data, keys, divide=True), rtol=2e-5, atol=2e-5)


def _uids(data: DataProto) -> list[str]:
    return data.non_tensor_batch["uid"].tolist()


def test_batches_of_the_test_above_have_sessions_of_several_outputs_and_advantages() -> None:
    data, keys = make_batch([3, 4], [1, 3, 2], 0)
    assert len({key.rsplit("_", 1)[0] for key in keys}) < len(keys)
    assert float(theirs(data, keys, divide=False).abs().max()) > 0.5


def test_group_of_one_is_where_the_two_part() -> None:
    data, keys = make_batch([1], [1], 0)
    reward = float(data.batch["token_level_rewards"].abs().max())
    assert reward > 0 and not ours(data, keys, "none").any()
    assert float(theirs(data, keys, divide=False).abs().max()) == pytest.approx(reward)
