# SPDX-License-Identifier: Apache-2.0
"""The part of a training step that needs whole groups and the whole config at once (runs on the driver)."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from scalerl_verl.advantages import AdvantageResult, row_weights


@dataclass
class AdvantageStep:
    """One call of verl's ``_compute_advantage``: what the estimator found and the metrics it leaves.

    Args:
        loss_agg_mode: the actor's aggregation mode.
        metrics: the step's metrics; ours are added under ``scalerl/``.
        result: set by the estimator ``scalerl``; None with any other estimator.
        nothing_trains: no row carries a learning signal, so the actor update is skipped.
        keep_rewards: whether `fold_row_weights` leaves the two fields below.
        rewards_B: reward per row before any KL penalty, [B] float64, rows in the order of the batch.
        trains_B: rows with at least one unmasked token, [B] bool.
    """

    loss_agg_mode: str
    metrics: dict[str, Any]
    result: AdvantageResult | None = None
    nothing_trains: bool = field(default=False)
    keep_rewards: bool = False
    rewards_B: np.ndarray | None = None
    trains_B: np.ndarray | None = None

    def note_result(self, result: AdvantageResult) -> None:
        """Record the estimator's result and its metrics."""
        groups = result.groups
        self.result = result
        self.metrics.update(
            {
                "scalerl/data/prompts_sum": groups.num_groups,
                "scalerl/data/prompts_mixed_sum": groups.num_mixed,
                "scalerl/data/prompts_all_right_sum": groups.num_all_right,
                "scalerl/data/prompts_all_wrong_sum": groups.num_all_wrong,
                "scalerl/data/prompts_single_sum": groups.num_single,
                "scalerl/data/rows_kept_sum": int(result.kept_B.sum()),
                "scalerl/advantage/std": result.std,
            }
        )
        self.nothing_trains = not result.groups.kept_B.any()


_current: contextvars.ContextVar[AdvantageStep | None] = contextvars.ContextVar("scalerl_step", default=None)


def current_step() -> AdvantageStep | None:
    """The advantage step in progress in this thread or task, if any."""
    return _current.get()


@contextlib.contextmanager
def advantage_step(config: Any, metrics: dict[str, Any]) -> Iterator[AdvantageStep]:
    """Make the actor's aggregation mode and the metrics visible to the estimator for one step."""
    step = AdvantageStep(loss_agg_mode=config.actor_rollout_ref.actor.loss_agg_mode, metrics=metrics)
    token = _current.set(step)
    try:
        yield step
    finally:
        _current.reset(token)


def fold_row_weights(data: Any) -> Any:
    """Multiply the row weights of the aggregation mode into ``data.batch["advantages"]`` ([B, T]).

    verl divides a mini-batch's loss by constants; the weights make that the average over what trains (see
    `scalerl_verl.advantages.row_weights`). This is exact for losses that are positively homogeneous in the advantage;
    the start-up check refuses the others. Without the estimator ``scalerl`` and without ``prompt-mean`` nothing is
    touched.

    Args:
        data: verl's DataProto after the estimator, rows in the order of the batch, padding rows included.

    Returns:
        The same object.
    """
    step = current_step()
    if step is None:
        return data
    mask_BT = data.batch["response_mask"].bool()
    num_tokens_B = mask_BT.sum(dim=-1).cpu().numpy()
    trains_B = num_tokens_B > 0
    step.metrics["scalerl/data/generated_tokens_sum"] = int(num_tokens_B.sum())
    if step.keep_rewards:
        scores_BT = data.batch["token_level_scores"]
        step.rewards_B = torch.where(mask_BT, scores_BT, 0.0).double().sum(dim=-1).cpu().numpy()
        step.trains_B = trains_B
    if step.result is None and step.loss_agg_mode != "prompt-mean":
        return data
    kept_B = trains_B if step.result is None else step.result.kept_B
    weights_B = row_weights(
        step.loss_agg_mode,
        num_tokens_B,
        np.asarray(data.non_tensor_batch["uid"]),
        kept_B,
        num_rows=len(num_tokens_B),
        trains_B=trains_B,
    )
    advantages_BT = data.batch["advantages"]
    weights = torch.as_tensor(weights_B, device=advantages_BT.device).to(advantages_BT.dtype)
    data.batch["advantages"] = advantages_BT * weights[:, None]
    return data
