# SPDX-License-Identifier: Apache-2.0
"""Only tokens that train reach a loss: what stands at masked positions is put to 0 before any arithmetic.

verl's losses compute on every position and mask the result, but 0 * NaN is NaN, and so is the gradient of a ratio with
NaN in it. A masked position may hold anything: a tool's output, a phrase that was put in, or padding has no log-prob.
"""

from __future__ import annotations

from typing import Any

import torch

_FIELDS = ("old_log_probs", "advantages", "rollout_is_weights", "ref_log_prob", "rollout_log_probs")
_OUTPUTS = ("log_probs", "entropy")


def select_unmasked(model_output: dict[str, Any], data: Any) -> tuple[dict[str, Any], Any]:
    """What verl's ``ppo_loss`` reads, 0 where the mask is False; so is the gradient there.

    Args:
        model_output: ``log_probs`` (and ``entropy``) of all tokens of prompts and responses, those of token t + 1 at
            position t: nested, or flat with the rows one after the other.
        data: the micro-batch: ``prompts``, ``responses``, ``response_mask`` and per-token fields, nested.

    Returns:
        Both as new objects, the outputs flat; the same ones if the batch is not nested, as verl's V1 trainer has it.
    """
    mask = data["response_mask"]
    if not mask.is_nested or not data["prompts"].is_nested:
        return model_output, data
    trains_N = mask.values().bool()
    selected = data.copy()
    for name in _FIELDS:
        if name in data:
            selected[name] = _fill(data[name], trains_N)
    trains_A = _among_all_tokens(data, trains_N)
    outputs = {}
    for name in _OUTPUTS:
        if (output := model_output.get(name)) is not None:
            values = output.values() if output.is_nested else output
            outputs[name] = values.masked_fill(~trains_A.to(values.device), 0.0)
    return model_output | outputs, selected


def _fill(nested: torch.Tensor, trains_N: torch.Tensor) -> torch.Tensor:
    """0 where the mask is False, nested as before."""
    # Not made anew of its values: verl pads to the width that a nested tensor remembers.
    filled = nested.detach().clone()
    filled.values().masked_fill_(~trains_N.to(nested.device), 0.0)
    return filled


def _among_all_tokens(data: Any, trains_N: torch.Tensor) -> torch.Tensor:
    """Which outputs of the model belong to tokens that train, over prompts and responses, [A] bool."""
    lengths_B = data["responses"].offsets().diff()
    ends_B = (data["prompts"].offsets().diff() + lengths_B).cumsum(0)
    starts_B = data["responses"].offsets()[:-1]
    numbers_N = torch.arange(len(trains_N), device=trains_N.device)
    # The output for a row's first token of the response stands at the last token of its prompt.
    shift_N = (ends_B - lengths_B - 1 - starts_B).repeat_interleave(lengths_B)
    trains_A = torch.zeros(int(ends_B[-1]), dtype=torch.bool, device=trains_N.device)
    trains_A[numbers_N + shift_N] = trains_N
    return trains_A
