# SPDX-License-Identifier: Apache-2.0
"""verl's config classes with what is ours in them (the start-up check selects both by ``_target_``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.workers.config import (
    FSDPActorConfig,
    McoreActorConfig,
    PolicyLossConfig,
    TorchTitanActorConfig,
    VeOmniActorConfig,
)

from scalerl_verl.loss.settings import PolicyLossSettings
from scalerl_verl.names import DEFAULT_EPS_MAX, LOSS_AGG_MODE, PROMPT_MEAN
from scalerl_verl.upstream.registry import require_checked_run

PLAIN_MODE = "seq-mean-token-sum"
"""verl's mode that is the prompt average of rows whose advantages carry prompt weights."""
STATISTICS_MODE = "token-mean"
"""verl's mode for what has no prompt weight: statistics and values."""


@dataclass
class ScaleRLPolicyLossConfig(PolicyLossConfig):
    """Adds the keys of ``scalerl_cispo``; `PolicyLossSettings` says what they mean."""

    eps_max: float = DEFAULT_EPS_MAX
    token_mask_range: list[float] | None = None
    sequence_truncation: str | None = None

    def __post_init__(self) -> None:
        PolicyLossSettings.from_config(self)


class _PromptMean:
    """Takes ``prompt-mean`` beside verl's modes, which verl lists inside its own check of the config.

    The name stays in the field: verl's aggregation refuses it, so that an actor whose engine does not call our loss
    cannot train on something else.
    """

    loss_agg_mode: str

    def __post_init__(self) -> None:
        mode = self.loss_agg_mode
        if mode == PROMPT_MEAN:
            require_checked_run(f"{LOSS_AGG_MODE}={PROMPT_MEAN}")
            # The field is frozen after __init__.
            object.__setattr__(self, "loss_agg_mode", PLAIN_MODE)
        try:
            super().__post_init__()  # type: ignore[misc]
        finally:
            object.__setattr__(self, "loss_agg_mode", mode)


class ScaleRLFSDPActorConfig(_PromptMean, FSDPActorConfig):
    """verl's config of an FSDP actor, with ``prompt-mean``."""


class ScaleRLMcoreActorConfig(_PromptMean, McoreActorConfig):
    """verl's config of a Megatron actor, with ``prompt-mean``."""


class ScaleRLVeOmniActorConfig(_PromptMean, VeOmniActorConfig):
    """verl's config of a VeOmni actor, with ``prompt-mean``."""


class ScaleRLTorchTitanActorConfig(_PromptMean, TorchTitanActorConfig):
    """verl's config of a TorchTitan actor, with ``prompt-mean``."""


@contextlib.contextmanager
def statistics_mode(config: Any) -> Iterator[None]:
    """Inside, verl's trainer aggregates its entropy metric, whose rows have no prompt weights, as a token mean.

    Args:
        config: verl's, composed; its actor's aggregation mode is another one inside.
    """
    actor = config.actor_rollout_ref.actor
    if actor.loss_agg_mode != PROMPT_MEAN:
        yield
        return
    actor.loss_agg_mode = STATISTICS_MODE
    try:
        yield
    finally:
        actor.loss_agg_mode = PROMPT_MEAN
