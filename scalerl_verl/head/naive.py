# SPDX-License-Identifier: Apache-2.0
"""The float64 truth: all logits at once, gradients by autograd. For tests and start-up probes, not for training."""

from __future__ import annotations

import torch

MAX_LOGITS = 1 << 27
"""More float64 logits than this (1 GiB) are refused: somebody is training with the reference."""


def linear_logprobs(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor, temperature: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and entropies in float64, [N] each (see `functional.linear_logprobs`)."""
    if len(hidden_NH) * len(weight_VH) > MAX_LOGITS:
        raise ValueError(
            f"impl='naive' got {len(hidden_NH)} tokens x {len(weight_VH)} vocabulary entries; at most {MAX_LOGITS} "
            "logits are allowed, it is the reference for small inputs. Use impl='auto'."
        )
    divisor = temperature.double()[:, None] if isinstance(temperature, torch.Tensor) else temperature
    with torch.autocast(hidden_NH.device.type, enabled=False):
        all_logp_NV = torch.log_softmax(hidden_NH.double() @ weight_VH.double().t() / divisor, dim=-1)
    logp_N = all_logp_NV.gather(1, labels_N[:, None])[:, 0]
    return logp_N, -(all_logp_NV.exp() * all_logp_NV).sum(dim=-1)
