# SPDX-License-Identifier: Apache-2.0
"""What stands at a masked token reaches neither a loss of verl's, nor its gradient, nor a metric.

verl's own `ppo_loss` and policy losses run here, under our wrappers of `ppo_loss`, `agg_loss` and the config's check.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.config import actor as actor_module
from verl.workers.utils import losses

from scalerl_verl.loss import aggregate_loss
from scalerl_verl.upstream.activation import ACTIVE_ENV
from scalerl_verl.verl import prompt_mean, training_step

MASKS = [[1, 0, 1, 0], [1, 1], [0]]
"""A token put in, one cut off at the end, and a padding row."""
LOSSES = ("vanilla", "gspo", "cispo", "gpg", "dppo_tv", "dppo_kl", "sapo")
INPUTS = ("log_probs", "old_log_probs", "advantages", "ref_log_prob", "entropy", "rollout_is_weights")
BUILDERS = {spec.name: spec.build for spec in (*prompt_mean.SPECS, *training_step.SPECS)}


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ACTIVE_ENV, "1")
    check = BUILDERS["verl.prompt_mean.config"](actor_module.ActorConfig.__post_init__, actor_module)
    monkeypatch.setattr(actor_module.ActorConfig, "__post_init__", check)
    policy = BUILDERS["verl.prompt_mean.policy"](core_algos.agg_loss, core_algos)
    statistic = BUILDERS["verl.prompt_mean.worker_statistics"](losses.agg_loss, losses)
    monkeypatch.setattr(core_algos, "agg_loss", policy)
    monkeypatch.setattr(losses, "agg_loss", statistic)


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@functools.cache
def values_of(name: str) -> tuple[tuple[float, ...], ...]:
    generator = torch.Generator().manual_seed(INPUTS.index(name))
    rows = [torch.rand(len(mask), generator=generator) for mask in MASKS]
    sign = -1.0 if "log_prob" in name else 1.0
    return tuple(tuple((sign * row + (0.0 if sign < 0 else 0.2)).tolist()) for row in rows)


def run(
    loss: str, mode: str, broken: str, junk: float, wrap: bool = True
) -> tuple[float, list[float], dict[str, list[float]]]:
    """Loss, gradient with respect to all log-probs and entropies, and metrics, with ``junk`` at masked tokens."""
    rows = {name: [list(row) for row in values_of(name)] for name in INPUTS}
    for row, mask in zip(rows[broken], MASKS, strict=True):
        row[:] = [value if trains else junk for value, trains in zip(row, mask, strict=True)]
    fields = {name: nested([torch.tensor(row) for row in rows[name]]) for name in INPUTS[1:] if name != "entropy"}
    data = TensorDict(
        {
            "prompts": nested([torch.zeros(2, dtype=torch.long) for _ in MASKS]),
            "responses": nested([torch.zeros(len(mask), dtype=torch.long) for mask in MASKS]),
            "response_mask": nested([torch.tensor(mask) for mask in MASKS]),
            **fields,
        },
        batch_size=len(MASKS),
    )
    tu.assign_non_tensor(data, dp_size=2, batch_num_tokens=4, global_batch_size=4)
    # The output for token t + 1 stands at t; a prompt of two tokens has one output before, and one comes after.
    flat = {
        name: torch.tensor([x for row in rows[name] for x in (-9.0, *row, -9.0)], requires_grad=True)
        for name in ("log_probs", "entropy")
    }
    config = FSDPActorConfig(
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=mode,
        policy_loss=PolicyLossConfig(loss_mode=loss),
        use_kl_loss=True,
        kl_loss_coef=0.1,
        entropy_coeff=0.01,
        loss_scale_factor=7,
    )
    ppo_loss = losses.ppo_loss
    if wrap:
        ppo_loss = BUILDERS["verl.training_step.metric_aggregation"](ppo_loss, losses)
    total, metrics = ppo_loss(config, dict(flat), data)
    total.backward()
    gradient = [x for tensor in flat.values() for x in tensor.grad.tolist()]
    values = {name: getattr(metric, "values", [metric]) for name, metric in metrics.items()}
    return float(total.detach()), gradient, values


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("broken", INPUTS)
@pytest.mark.parametrize("mode", ["prompt-mean", "token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("loss", LOSSES)
def test_junk_at_masked_tokens_changes_nothing(loss: str, mode: str, broken: str, junk: float) -> None:
    expected = run(loss, mode, broken, 0.0)
    assert run(loss, mode, broken, junk) == expected
    total, gradient, metrics = expected
    assert math.isfinite(total) and all(map(math.isfinite, gradient)) and any(gradient)
    assert all(math.isfinite(value) for values in metrics.values() for value in values)


@pytest.mark.parametrize("loss", LOSSES)
def test_finite_batches_keep_verl_s_numbers(loss: str) -> None:
    """Where nothing is broken, our wrapper of `ppo_loss` changes no bit of verl's."""
    assert run(loss, "token-mean", "log_probs", -1.0) == run(loss, "token-mean", "log_probs", -1.0, wrap=False)


def test_prompt_average_without_the_size_of_the_batch_is_refused() -> None:
    """The rows of a micro-batch in its place would make another loss of every split."""
    loss_BT, mask_BT = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for function in (core_algos.agg_loss, aggregate_loss):
        with pytest.raises(ValueError, match=r"global_batch_size=None.*pass the rows of the whole mini-batch"):
            function(loss_BT, mask_BT, "prompt-mean")
        assert float(function(loss_BT, mask_BT, "prompt-mean", global_batch_size=4)) == 1.5
