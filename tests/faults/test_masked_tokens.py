# SPDX-License-Identifier: Apache-2.0
"""What stands at a masked token reaches neither a loss of verl's, nor its gradient, nor a metric.

verl's own `ppo_loss` and policy losses run here, inside the loss that our engines put around them.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import PolicyLossConfig
from verl.workers.utils import losses

from scalerl_verl.loss import aggregate_loss
from scalerl_verl.loss.verl_config import ScaleRLFSDPActorConfig
from scalerl_verl.upstream.activation import ACTIVE_ENV
from scalerl_verl.verl import actor_loss

MASKS = [[1, 0, 1, 0], [1, 1], [0]]
"""A token put in, one cut off at the end, and a padding row."""
LOSSES = ("vanilla", "gspo", "cispo", "gpg", "dppo_tv", "dppo_kl", "sapo")
INPUTS = ("log_probs", "old_log_probs", "advantages", "ref_log_prob", "entropy", "rollout_is_weights")


@pytest.fixture(autouse=True)
def checked_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ACTIVE_ENV, "1")


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@functools.cache
def values_of(name: str) -> tuple[tuple[float, ...], ...]:
    generator = torch.Generator().manual_seed(INPUTS.index(name))
    rows = [torch.rand(len(mask), generator=generator) for mask in MASKS]
    sign = -1.0 if "log_prob" in name else 1.0
    return tuple(tuple((sign * row + (0.0 if sign < 0 else 0.2)).tolist()) for row in rows)


def run(
    loss: str, mode: str, broken: str, junk: float, ours: bool = True, batch_size: int | None = 4
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
    tu.assign_non_tensor(data, dp_size=2, batch_num_tokens=4, global_batch_size=batch_size)
    # The output for token t + 1 stands at t; a prompt of two tokens has one output before, and one comes after.
    flat = {
        name: torch.tensor([x for row in rows[name] for x in (-9.0, *row, -9.0)], requires_grad=True)
        for name in ("log_probs", "entropy")
    }
    config = ScaleRLFSDPActorConfig(
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=mode,
        policy_loss=PolicyLossConfig(loss_mode=loss),
        use_kl_loss=True,
        kl_loss_coef=0.1,
        entropy_coeff=0.01,
        loss_scale_factor=7,
    )
    ppo_loss = actor_loss.ppo_loss if ours else losses.ppo_loss
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
    """Where nothing is broken, our `ppo_loss` changes no bit of verl's."""
    assert run(loss, "token-mean", "log_probs", -1.0) == run(loss, "token-mean", "log_probs", -1.0, ours=False)


def test_prompt_average_without_the_size_of_the_batch_is_refused() -> None:
    """The rows of a micro-batch in its place would make another loss of every split."""
    loss_BT, mask_BT = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"global_batch_size=None.*pass the rows of the whole mini-batch"):
        aggregate_loss(loss_BT, mask_BT, "prompt-mean")
    assert float(aggregate_loss(loss_BT, mask_BT, "prompt-mean", global_batch_size=4)) == 1.5
    with pytest.raises(ValueError, match=r"global_batch_size=None.*pass the rows of the whole mini-batch"):
        run("vanilla", "prompt-mean", "log_probs", 0.0, batch_size=None)


def test_actor_whose_engine_calls_verl_s_loss_cannot_train_on_another_average() -> None:
    """verl refuses the mode's name, which our config lets through."""
    with pytest.raises(ValueError, match="prompt-mean"):
        run("vanilla", "prompt-mean", "log_probs", 0.0, ours=False)
