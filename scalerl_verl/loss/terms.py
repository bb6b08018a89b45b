# SPDX-License-Identifier: Apache-2.0
"""What verl adds to the policy loss: terms that train although every advantage is 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from scalerl_verl.names import ACTOR, MODEL, select

_MEGATRON = f"{ACTOR}.megatron.override_transformer_config"
WEIGHTED: dict[str, Any] = {f"{ACTOR}.entropy_coeff": 0, f"{ACTOR}.use_kl_loss": False}
"""Key -> value without the term, of terms that average over rows, with the row weights of the policy loss."""
UNWEIGHTED: dict[str, Any] = {"distillation.enabled": False}
"""The same of terms that average over rows as verl does it, whatever the policy loss leaves out."""
WITHIN_THE_MODEL: dict[str, Any] = {
    f"{_MEGATRON}.moe_aux_loss_coeff": 0,
    f"{_MEGATRON}.moe_z_loss_coeff": 0,
    f"{MODEL}.mtp.enable_train": False,
}
"""The same of terms that the model adds to its gradient in every pass: losses of routers, multi-token prediction."""


def active_terms(config: Any, keys: Mapping[str, Any] = WEIGHTED | UNWEIGHTED | WITHIN_THE_MODEL) -> dict[str, Any]:
    """Key -> value of each of these terms that the loss has.

    A critic is no such term: it has an optimizer and an update of its own, which nothing here skips.
    """
    if not isinstance(config, DictConfig):
        return {}
    given = {key: (select(config, key, off), off) for key, off in keys.items()}
    return {key: value for key, (value, off) in given.items() if value != off}
