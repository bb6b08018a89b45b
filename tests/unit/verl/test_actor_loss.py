# SPDX-License-Identifier: Apache-2.0
"""Log-ratios by age, in a micro-batch as verl's engines hand it to the loss of the actor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import PolicyLossConfig

from scalerl_verl.columns import MAX_AGE, VERSION
from scalerl_verl.loss.token_means import divide
from scalerl_verl.loss.verl_config import ScaleRLFSDPActorConfig
from scalerl_verl.upstream.activation import ACTIVE_ENV
from scalerl_verl.verl import actor_loss

MASKS = [[1, 1], [1, 0, 1], [0]]
"""A fresh response, an older one with a token put in, and a padding row, whose versions are those of another row."""
EXTRAS = [{"versions": [[4, 2]]}, {"versions": [[3, 1], [4, 1]]}, {"versions": [[4, 2]]}]


@pytest.fixture(autouse=True)
def checked_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ACTIVE_ENV, "1")


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def run(**told: int) -> dict[str, Any]:
    """Metrics of a loss of verl's; the log-ratios are 1 and 3, then 2, junk, 6, then junk."""
    log_probs = [[-2.0, -4.0], [-3.0, math.nan, -7.0], [math.nan]]
    zeros = nested([torch.zeros(len(mask)) for mask in MASKS])
    recorded = nested([torch.full((len(mask),), -1.0) for mask in MASKS])
    data = TensorDict(
        {
            "prompts": nested([torch.zeros(2, dtype=torch.long) for _ in MASKS]),
            "responses": nested([torch.zeros(len(mask), dtype=torch.long) for mask in MASKS]),
            "response_mask": nested([torch.tensor(mask) for mask in MASKS]),
            "old_log_probs": recorded,
            "rollout_log_probs": recorded,
            "advantages": zeros,
            "extra_fields": NonTensorStack(*map(NonTensorData, EXTRAS)),
        },
        batch_size=len(MASKS),
    )
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=4, global_batch_size=2, **told)
    flat = torch.tensor([x for row in log_probs for x in (-9.0, *row, -9.0)], requires_grad=True)
    config = ScaleRLFSDPActorConfig(
        rollout_n=2, ppo_micro_batch_size_per_gpu=1, policy_loss=PolicyLossConfig(loss_mode="vanilla")
    )
    return actor_loss.ppo_loss(config, {"log_probs": flat}, data)[1]


def test_log_ratios_are_split_by_age_whatever_the_loss() -> None:
    metrics = run(**{VERSION: 4, MAX_AGE: 2})
    ours = {name: metric for name, metric in metrics.items() if name.startswith("scalerl/")}
    assert {metric.aggregation.value for metric in ours.values()} == {"sum"}
    found = divide({name: metric.aggregate() for name, metric in ours.items()})
    assert {name.removeprefix("scalerl/mismatch/"): value for name, value in found.items()} == pytest.approx(
        {
            "engines/log_ratio_abs_mean": 2.0,
            "engines/log_ratio_square_mean": 5.0,
            "age_0/log_ratio_abs_mean": 10 / 3,
            "age_0/log_ratio_square_mean": 46 / 3,
            "age_1/log_ratio_abs_mean": 2.0,
            "age_1/log_ratio_square_mean": 4.0,
            "log_ratio_square_mean": 12.5,
        }
    )


def test_runs_of_other_modes_measure_nothing_by_age() -> None:
    assert not [name for name in run() if name.startswith("scalerl/")]
