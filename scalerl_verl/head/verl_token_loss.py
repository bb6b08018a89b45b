# SPDX-License-Identifier: Apache-2.0
"""The token loss of a micro-batch, in the layout in which verl's engine hands tokens to the model.

The head with a shared pass makes gradients during forward, before verl's loss exists: it needs the recorded log-prob,
advantage and mask of the token that each position predicts. verl packs, pads, rolls and (under sequence parallelism)
slices tokens on the way; here a batch whose tokens are their own numbers takes the same way.

Shape legend: B rows (responses), T tokens of the padded response, N positions handed to the model on this rank.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch

from scalerl_verl.errors import HeadError
from scalerl_verl.head.shared_pass import TokenLoss
from scalerl_verl.loss import cispo_token_loss
from scalerl_verl.loss.settings import PolicyLossSettings
from scalerl_verl.names import CISPO, CORRECTION, FP32, HEAD_BACKEND, SHARED_PASS

_FIELDS = ("response_mask", "old_log_probs", "advantages")
_current: contextvars.ContextVar[TokenLoss | None] = contextvars.ContextVar("scalerl_token_loss", default=None)


def current_token_loss() -> TokenLoss:
    """Return the token loss of the micro-batch under way.

    Raises:
        HeadError: gradients are asked for outside of verl's training step.
    """
    token_loss = _current.get()
    if token_loss is None:
        raise HeadError(
            f"impl_backend={SHARED_PASS} makes gradients for loss_mode={CISPO} of an actor's training step only, and "
            f"this forward asks for gradients elsewhere: set {HEAD_BACKEND}={FP32}"
        )
    return token_loss


@contextlib.contextmanager
def token_loss_of(engine: Any, micro_batch: Any, loss_function: Any) -> Iterator[None]:
    """Inside, the model's forward finds the token loss of this micro-batch.

    Args:
        engine: verl's FSDP engine.
        micro_batch: TensorDict on the engine's device.
        loss_function: verl's `ppo_loss` with its config bound.
    """
    token = _current.set(_build(engine, micro_batch, _policy_loss_section(loss_function)))
    try:
        yield
    finally:
        _current.reset(token)


def _policy_loss_section(loss_function: Any) -> Any:
    """verl binds its ActorConfig to `ppo_loss`; its `policy_loss` is what this returns."""
    config = None
    if isinstance(loss_function, functools.partial):
        config = loss_function.keywords.get("config", loss_function.args[0] if loss_function.args else None)
    section = getattr(config, "policy_loss", None)
    mode = section.get("loss_mode") if section is not None else None
    if mode != CISPO:
        raise HeadError(
            f"impl_backend={SHARED_PASS} got the loss {mode or loss_function}: it knows the gradient of {CISPO}; set "
            f"{HEAD_BACKEND}={FP32}"
        )
    return section


def _build(engine: Any, micro_batch: Any, section: Any) -> TokenLoss:
    options = dataclasses.asdict(PolicyLossSettings.from_config(section))
    if options.pop("sequence_truncation") is not None:
        raise HeadError(f"impl_backend={SHARED_PASS} needs a ratio per token: set policy_loss.sequence_truncation=null")
    if micro_batch.get("rollout_is_weights", None) is not None:
        raise HeadError(f"impl_backend={SHARED_PASS}: set {CORRECTION}.rollout_is=null")
    number_N = _numbers_of_next_tokens(engine, micro_batch)
    mask_N, logp_rollout_N, advantages_N = (values[number_N] for values in _by_number(micro_batch))

    def token_loss(logp_C: torch.Tensor, at: slice) -> torch.Tensor:
        loss_1C = cispo_token_loss(
            logp_C[None], logp_rollout_N[at][None], advantages_N[at][None], mask_N[at][None], **options
        )
        return loss_1C[0]

    return token_loss


def _numbers_of_next_tokens(engine: Any, micro_batch: Any) -> torch.Tensor:
    """Return, for each position handed to the model, the number (from 1) of the token it predicts; 0: padding, [N]."""
    from verl.utils import tensordict_utils as tu

    from scalerl_verl.head.model import next_tokens

    input_ids = micro_batch["input_ids"]
    numbers = torch.arange(1, input_ids.values().shape[0] + 1, device=input_ids.device)
    numbered = micro_batch.copy()
    numbered["input_ids"] = torch.nested.nested_tensor_from_jagged(numbers, input_ids.offsets())
    tu.assign_non_tensor(numbered, pad_token_id=0)
    inputs, _ = engine.prepare_model_inputs(numbered)
    return next_tokens(inputs.get("shift_labels"), None, inputs["input_ids"]).flatten()


def _by_number(micro_batch: Any) -> list[torch.Tensor]:
    """Return mask, recorded log-prob and advantage of each token of the micro-batch by its number; 0 is masked."""
    padded = micro_batch.select(*_FIELDS).to_padded_tensor()
    # input_ids is prompt + response of each row, one after the other.
    ends_B = micro_batch["input_ids"].offsets()[1:]
    lengths_B = micro_batch["responses"].offsets().diff()
    step_T = torch.arange(padded["response_mask"].shape[1], device=ends_B.device)
    inside_BT = step_T < lengths_B[:, None]
    number_BT = (ends_B - lengths_B + 1)[:, None] + step_T
    values = []
    for name in _FIELDS:
        values_BT = padded[name]
        by_number = values_BT.new_zeros(micro_batch["input_ids"].values().shape[0] + 1)
        by_number[number_BT[inside_BT]] = values_BT[inside_BT]
        values.append(by_number)
    return values
