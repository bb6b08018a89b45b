# SPDX-License-Identifier: Apache-2.0
"""Let ``loss_agg_mode=prompt-mean`` through verl's white-list and its aggregation function.

The weights of the prompt average are folded into the advantages on the driver (see `training_step`), where
whole groups are visible; what is left for the workers is a sequence mean of token sums.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from scalerl_verl.upstream.registry import require_checked_run
from scalerl_verl.upstream.spec import VERL_VERSIONS, PatchSpec

PROMPT_MEAN = "prompt-mean"
_EQUIVALENT = "seq-mean-token-sum"
_VERSIONS = VERL_VERSIONS
_REMOVAL = "verl has a prompt-level aggregation mode (see patches/verl)"


def _build_config(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        mode = self.loss_agg_mode
        if mode != PROMPT_MEAN:
            original(self)
            return
        require_checked_run(f"loss_agg_mode={PROMPT_MEAN}")
        # verl compares with a list that is local to this method; the field itself is frozen after __init__.
        object.__setattr__(self, "loss_agg_mode", _EQUIVALENT)
        try:
            original(self)
        finally:
            object.__setattr__(self, "loss_agg_mode", mode)

    return __post_init__


def _build_policy(original: Any, module: ModuleType) -> Any:
    from scalerl_verl.loss.aggregation import MISSING_BATCH_SIZE

    @functools.wraps(original)
    def agg_loss(loss_mat: Any, loss_mask: Any, loss_agg_mode: str, **info: Any) -> Any:
        if loss_agg_mode != PROMPT_MEAN:
            return original(loss_mat, loss_mask, loss_agg_mode, **info)
        if info.get("global_batch_size") is None:
            raise ValueError(MISSING_BATCH_SIZE)
        return original(loss_mat, loss_mask, _EQUIVALENT, **info)

    return agg_loss


def _build_statistic(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def agg_loss(loss_mat: Any, loss_mask: Any, loss_agg_mode: str, **info: Any) -> Any:
        # A metric, no part of the loss: rows have no weights here.
        return original(loss_mat, loss_mask, "token-mean" if loss_agg_mode == PROMPT_MEAN else loss_agg_mode, **info)

    return agg_loss


def _build_term(original: Any, module: ModuleType) -> Any:
    from scalerl_verl.loss.term_weights import current_weights

    statistic = _build_statistic(original, module)

    @functools.wraps(original)
    def agg_loss(loss_mat: Any, loss_mask: Any, loss_agg_mode: str, **info: Any) -> Any:
        weights_B = current_weights()
        if weights_B is None:
            return statistic(loss_mat, loss_mask, loss_agg_mode, **info)
        mode = _EQUIVALENT if loss_agg_mode == PROMPT_MEAN else loss_agg_mode
        return original(loss_mat * weights_B[:, None].to(loss_mat), loss_mask, mode, **info)

    return agg_loss


def _build_value(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def compute_value_loss(*args: Any, loss_agg_mode: str = "token-mean", **kwargs: Any) -> Any:
        # verl lets critic.loss_agg_mode follow the actor's. Values carry no prompt weight: token mean, verl's default.
        mode = "token-mean" if loss_agg_mode == PROMPT_MEAN else loss_agg_mode
        return original(*args, loss_agg_mode=mode, **kwargs)

    return compute_value_loss


SPECS = (
    PatchSpec(
        name="verl.prompt_mean.config",
        module="verl.workers.config.actor",
        target="ActorConfig.__post_init__",
        build=_build_config,
        kind="wrap",
        why="The list of aggregation modes is local to ActorConfig.__post_init__: any other name is a ValueError.",
        distribution="verl",
        versions=_VERSIONS,
        sources=("512487971933331a323044a1dec790326e6ffc8af98a14ca76c06950432385b9",),
        when="named",
        removal=_REMOVAL,
        late_ok=True,
    ),
    PatchSpec(
        name="verl.prompt_mean.policy",
        module="verl.trainer.ppo.core_algos",
        target="agg_loss",
        build=_build_policy,
        kind="wrap",
        why="verl's own policy losses aggregate through this function and would refuse the mode.",
        distribution="verl",
        versions=_VERSIONS,
        sources=("baa1eabb337dd663c9191186b7da54398d0f80460450c95f2162980dd147032e",),
        when="named",
        removal=_REMOVAL,
    ),
    PatchSpec(
        name="verl.prompt_mean.worker_statistics",
        module="verl.workers.utils.losses",
        target="agg_loss",
        build=_build_term,
        kind="wrap",
        why="Entropy and KL of the actor step have no advantage to carry the weights of rows.",
        distribution="verl",
        versions=_VERSIONS,
        sources=(),
        when="named",
        removal=_REMOVAL,
    ),
    PatchSpec(
        name="verl.prompt_mean.critic",
        module="verl.workers.utils.losses",
        target="compute_value_loss",
        build=_build_value,
        kind="wrap",
        why="The critic's aggregation mode follows the actor's by default, but values carry no prompt weight.",
        distribution="verl",
        versions=_VERSIONS,
        sources=("7bfde458f0c4ff06f89fe1ea7005a5b692db8c642878934a6576f7eb18282c8d",),
        when="named",
        removal=_REMOVAL,
    ),
    PatchSpec(
        name="verl.prompt_mean.trainer_statistics",
        module="verl.trainer.ppo.v1.trainer_base",
        target="agg_loss",
        build=_build_statistic,
        kind="wrap",
        why="The trainer's entropy metric is aggregated with the actor's mode but carries no prompt weight.",
        distribution="verl",
        versions=_VERSIONS,
        sources=(),
        when="named",
        removal=_REMOVAL,
    ),
)
