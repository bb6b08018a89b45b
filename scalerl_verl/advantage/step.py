# SPDX-License-Identifier: Apache-2.0
"""The part of a training step that needs whole groups and the whole config at once (runs on the driver)."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scalerl_verl.advantage import AdvantageResult, Sessions, index_sessions, row_weights
from scalerl_verl.advantage.passing import judge, reward_infos
from scalerl_verl.advantage.reward_shaping import RewardShaping
from scalerl_verl.advantage.rows import count_tokens, sum_rows
from scalerl_verl.advantage.shaping_step import read_extra_fields, shape_batch
from scalerl_verl.engine_context import engine_context, read_hf_config
from scalerl_verl.loss.terms import active_terms
from scalerl_verl.names import ESTIMATOR, LOSSES, PROMPT_MEAN


@dataclass
class AdvantageStep:
    """One call of verl's ``_compute_advantage``: what the estimator found and the metrics it leaves.

    Args:
        loss_agg_mode: the actor's aggregation mode.
        metrics: the step's metrics; ours are added under ``scalerl/``.
        uses_groups: our estimator or prompt average is in use.
        uses_names: these or our policy loss are in use; a run without them gets no metric of ours.
        has_other_terms: the loss has a term that trains without advantages (see `active_terms`).
        result: set by the estimator ``scalerl``; None with any other estimator.
        needs_signal: an update in which no row has an advantage trains nothing, so it is skipped.
        rows_of_steps: rows of each optimizer step on the batch; None: one step, or verl's own division.
        weighted: the advantages carry the row weights already, put there by the estimator ``scalerl``.
        keep_rewards: whether `fold_row_weights` leaves the two fields below.
        rewards_B: reward per row before any KL penalty, [B] float64, rows in the order of the batch.
        trains_B: rows with at least one unmasked token, [B] bool.
        num_tokens_B: unmasked tokens per row, [B] int64; kept_B: rows with a learning signal, [B] bool, None if all.
        sessions: which rows are outputs of one response; None until `prepare_rows` saw the keys of the batch.
        shapings: reward shaping, name -> object, in the order of application.
        config: the run's, for the definition of a pass; None where nothing is judged.
        batch: verl's KVBatchMeta, for the reward shaping and what the reward function returned.
        max_response_length: ``data.max_response_length``, for the reward shaping.
        left_out_B: rows that a reward shaping leaves out of training, [B] bool.
        weights_B: what was multiplied into the advantages of each row, [B] float64; None: nothing.
    """

    loss_agg_mode: str
    metrics: dict[str, Any]
    uses_groups: bool = False
    uses_names: bool = False
    has_other_terms: bool = False
    result: AdvantageResult | None = None
    needs_signal: bool = True
    weighted: bool = False
    keep_rewards: bool = False
    rewards_B: NDArray[np.float64] | None = None
    trains_B: NDArray[np.bool_] | None = None
    num_tokens_B: NDArray[np.int64] | None = None
    kept_B: NDArray[np.bool_] | None = None
    sessions: Sessions | None = None
    shapings: Mapping[str, RewardShaping] = field(default_factory=dict)
    config: Any = None
    batch: Any = None
    max_response_length: int = 0
    left_out_B: NDArray[np.bool_] | None = None
    weights_B: NDArray[np.float64] | None = None
    rows_of_steps: Sequence[NDArray[np.int64]] | None = None
    _extra_fields: list[Mapping[str, Any]] | None = None

    def extra_fields(self) -> list[Mapping[str, Any]]:
        """What the agent loop recorded of each row, asked for once."""
        if self._extra_fields is None:
            self._extra_fields = read_extra_fields(self.batch)
        return self._extra_fields

    def judge_rows(self, rewards_B: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether each row passed, by what the reward function gave; False for padding rows, [B] bool.

        Args:
            rewards_B: the reward function's, before shaping and KL penalty, [B].

        Raises:
            RewardError: it gave something that neither passes nor fails.
        """
        rows = self._real_rows()
        infos = reward_infos([self.extra_fields()[row] for row in rows])
        passed_B = np.zeros(len(rewards_B), dtype=np.bool_)
        passed_B[rows] = judge(self.config, rewards_B[rows], infos)
        return passed_B

    def _real_rows(self) -> list[int]:
        """Rows that are no padding."""
        return [row for row, tag in enumerate(self.batch.tags) if not tag.get("is_padding", False)]

    def sampled_rows(self) -> tuple[list[Mapping[str, Any]], list[int]]:
        """What the agent loop recorded of each row that is no padding, and how many of its tokens were sampled."""
        assert self.num_tokens_B is not None, "rows are counted when their advantages are computed"
        rows = self._real_rows()
        return [self.extra_fields()[row] for row in rows], self.num_tokens_B[rows].tolist()

    def count_outcomes(self) -> None:
        """Metrics of the prompts whose rewards are all equal, by what their responses achieved."""
        if self.result is None or self.sessions is None or self.rewards_B is None:
            return
        groups = self.result.groups
        passed_S = self.judge_rows(self.rewards_B)[self.sessions.final_row_S]
        equal_P = np.array([kind not in ("mixed", "single") for kind in groups.kind_P], dtype=np.bool_)
        trains_S = groups.group_index_B >= 0
        index_S = groups.group_index_B[trains_S]
        num_passed_P = np.bincount(index_S, weights=passed_S[trains_S], minlength=groups.num_groups)
        self.metrics["scalerl/data/prompts_all_right_sum"] = int((equal_P & (num_passed_P == groups.size_P)).sum())
        self.metrics["scalerl/data/prompts_all_wrong_sum"] = int((equal_P & (num_passed_P == 0)).sum())

    def note_result(self, result: AdvantageResult, *, keeps: bool) -> None:
        """Record the estimator's result and its metrics.

        Args:
            result: of the whole batch.
            keeps: ``zero_variance=keep``: the other terms of the loss train on prompts of equal rewards, too.
        """
        groups = result.groups
        self.result = result
        self.metrics.update(
            {
                "scalerl/data/prompts_sum": groups.num_groups,
                "scalerl/data/prompts_mixed_sum": groups.num_mixed,
                # By the rewards alone; `count_outcomes` has what the reward function said of them, too.
                "scalerl/data/prompts_all_right_sum": groups.num_all_right,
                "scalerl/data/prompts_all_wrong_sum": groups.num_all_wrong,
                "scalerl/data/prompts_single_sum": groups.num_single,
                "scalerl/data/rows_kept_sum": int(result.kept_B.sum()),
                "scalerl/advantage/std": result.std,
            }
        )
        self.needs_signal = not (keeps and self.has_other_terms)

    def steps_without_signal(self) -> list[int]:
        """Optimizer steps (0 where there is one) in which no row has an advantage and no other term trains."""
        if self.result is None or not self.needs_signal:
            return []
        advantages_B = self.result.advantages_B
        steps = self.rows_of_steps or [np.arange(len(advantages_B))]
        return [number for number, rows in enumerate(steps) if not advantages_B[rows].any()]

    def leave_out_rows(self, rows: NDArray[np.int64]) -> None:
        """Count these rows as not trained."""
        if self.kept_B is not None:
            self.kept_B = self.kept_B.copy()
            self.kept_B[rows] = False

    def note_rewards(self, scores_BT: torch.Tensor, mask_BT: torch.Tensor) -> None:
        """Keep each row's reward before any KL penalty, for what judges it."""
        self.rewards_B = sum_rows(scores_BT, mask_BT)
        self.trains_B = count_tokens(mask_BT) > 0

    def weigh_rows(
        self, num_tokens_B: NDArray[np.int64], group_ids_B: NDArray[Any], kept_B: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Weights of the aggregation mode for rows in the order of the batch, padding rows included, [B] float64."""
        self.weighted, self.kept_B = True, kept_B
        self.count_generated(num_tokens_B)
        weights_B = np.zeros(len(num_tokens_B), dtype=np.float64)
        for rows in self.rows_of_steps or [np.arange(len(num_tokens_B))]:
            weights_B[rows] = row_weights(
                self.loss_agg_mode,
                num_tokens_B[rows],
                [group_ids_B[row] for row in rows.tolist()],
                kept_B[rows],
                num_rows=len(rows),
                trains_B=num_tokens_B[rows] > 0,
                # Whole prompts are in a step, hence whole sessions.
                sessions=self.sessions and replace(self.sessions, index_B=self.sessions.index_B[rows]),
            )
        self.weights_B = weights_B
        return weights_B

    def count_generated(self, num_tokens_B: NDArray[np.int64]) -> None:
        """Record the number of tokens that the batch holds."""
        self.num_tokens_B = num_tokens_B
        self.metrics["scalerl/data/generated_tokens_sum"] = int(num_tokens_B.sum())


_current: contextvars.ContextVar[AdvantageStep | None] = contextvars.ContextVar("scalerl_step", default=None)


def current_step() -> AdvantageStep | None:
    """The advantage step in progress in this thread or task, if any."""
    return _current.get()


def uses_groups(config: Any) -> bool:
    """Whether a composed config names our estimator or prompt average."""
    mode = config.actor_rollout_ref.actor.loss_agg_mode
    return bool(mode == PROMPT_MEAN or config.algorithm.adv_estimator == ESTIMATOR)


def uses_names(config: Any) -> bool:
    """Whether a composed config names our estimator, prompt average or policy loss."""
    return uses_groups(config) or bool(config.actor_rollout_ref.actor.policy_loss.loss_mode in LOSSES)


@contextlib.contextmanager
def advantage_step(config: Any, metrics: dict[str, Any]) -> Iterator[AdvantageStep]:
    """Make the actor's aggregation mode and the metrics visible to the estimator for one step."""
    step = AdvantageStep(
        config.actor_rollout_ref.actor.loss_agg_mode,
        metrics,
        uses_groups=uses_groups(config),
        uses_names=uses_names(config),
        has_other_terms=bool(active_terms(config)),
    )
    token = _current.set(step)
    try:
        yield step
    finally:
        _current.reset(token)


def prepare_rows(data: Any, batch_keys: Sequence[str]) -> None:
    """Before the estimator: find the sessions of the batch and apply the reward shaping that the config asks for.

    Args:
        data: verl's DataProto; its rewards change if a shaping changes them.
        batch_keys: verl's row keys, ``{uid}_{session}_{output}``, in the order of the rows.

    Raises:
        ValueError: as `index_sessions` and `shape_batch`.
    """
    step = current_step()
    if step is None or not (step.uses_groups or step.shapings):
        return
    step.sessions = index_sessions(batch_keys)
    if step.shapings:
        scores_B = sum_rows(data.batch["token_level_scores"], data.batch["response_mask"].bool())
        trains_B = shape_batch(
            data,
            step.sessions,
            step.batch,
            step.shapings,
            step.max_response_length,
            step.judge_rows(scores_B),
            step.extra_fields(),
            engine_context(step.config, read_hf_config(step.config)),
        )
        step.left_out_B = ~trains_B
        step.metrics["scalerl/data/rows_left_out_sum"] = int(step.left_out_B.sum())


def fold_row_weights(data: Any) -> Any:
    """Multiply the row weights of the aggregation mode into ``data.batch["advantages"]`` ([B, T]).

    verl divides a mini-batch's loss by constants; the weights make that the average over what trains (see
    `scalerl_verl.advantage.row_weights`). This is exact for losses that are positively homogeneous in the advantage;
    the start-up check refuses the others. The estimator ``scalerl`` puts them there itself; with an estimator of verl
    only ``prompt-mean`` needs any.

    Args:
        data: verl's DataProto after the estimator, rows in the order of the batch, padding rows included.

    Returns:
        The same object.
    """
    step = current_step()
    if step is None:
        return data
    if step.keep_rewards:
        step.note_rewards(data.batch["token_level_scores"], data.batch["response_mask"].bool())
    if step.weighted:
        return data
    num_tokens_B = step.num_tokens_B = count_tokens(data.batch["response_mask"].bool())
    if not step.uses_names:
        return data
    if step.loss_agg_mode != PROMPT_MEAN:
        step.count_generated(num_tokens_B)
        return data
    weights_B = step.weigh_rows(num_tokens_B, np.asarray(data.non_tensor_batch["uid"]), num_tokens_B > 0)
    advantages_BT = data.batch["advantages"]
    weights = torch.as_tensor(weights_B, device=advantages_BT.device).to(advantages_BT.dtype)
    data.batch["advantages"] = advantages_BT * weights[:, None]
    return data
