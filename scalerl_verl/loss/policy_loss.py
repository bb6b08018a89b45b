# SPDX-License-Identifier: Apache-2.0
"""`PolicyLoss`, the interface of our policy losses, and their look-up by the name that a user types."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from scalerl_verl.names import LOSSES


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss that compares the trained policy with the log-probs recorded at sampling.

    Args:
        token_loss: ``(logp_train_BT, logp_rollout_BT, advantages_BT, mask_BT, **options)`` -> loss per token, [B, T].
        metrics: with the same arguments -> name -> (value, how to aggregate it: "sum", "max", "min" or "mean"); the
            names never vary. Those under ``scalerl/mismatch/`` are of `scalerl_verl.loss.mismatch`.
        options: keys of ``actor_rollout_ref.actor.policy_loss`` that it reads, of those in `PolicyLossSettings`.
    """

    token_loss: Callable[..., torch.Tensor]
    metrics: Callable[..., dict[str, tuple[float, str]]]
    options: tuple[str, ...] = ()


def find_loss(name: str) -> PolicyLoss:
    """The loss of a name in `names.LOSSES`: ``LOSS`` of its module."""
    loss: PolicyLoss = importlib.import_module(f"scalerl_verl.loss.{LOSSES[name]}").LOSS
    return loss
