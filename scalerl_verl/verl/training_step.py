# SPDX-License-Identifier: Apache-2.0
"""Whole prompts for each optimizer step, weights folded into advantages on the driver, no step on nothing."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from scalerl_verl.upstream.spec import VERL_VERSIONS, PatchSpec

_VERSIONS = VERL_VERSIONS


def _build_step(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def _compute_advantage(self: Any, batch: Any, metrics: dict) -> Any:
        from scalerl_verl.advantage.length_step import record_lengths, watches_lengths
        from scalerl_verl.advantage.shaping_step import read_shapings
        from scalerl_verl.advantage.step import advantage_step
        from scalerl_verl.curriculum.verl import find_sampler, record_visits
        from scalerl_verl.ledger.verl import count_batch
        from scalerl_verl.loss.term_weights import write_weights
        from scalerl_verl.loss.terms import WEIGHTED, active_terms

        sampler = find_sampler(self)
        with advantage_step(self.config, metrics) as step:
            step.config, step.batch = self.config, batch
            step.shapings = read_shapings(self.config)
            division = getattr(self, "_scalerl_step_rows", None)
            step.rows_of_steps = None if division is None else division.rows()
            watched = watches_lengths(self.config)
            step.keep_rewards = sampler is not None or watched
            if step.shapings:
                step.max_response_length = int(self.config.data.max_response_length)
            result = original(self, batch, metrics)
        if step.weights_B is not None and active_terms(self.config, WEIGHTED):
            result = write_weights(result, step.weights_B)
        step.count_outcomes()
        if sampler is not None:
            record_visits(sampler, batch, step)
        count_batch(self, batch, step)
        if watched:
            record_lengths(self, batch, step)
        self._scalerl_step = step
        return result

    return _compute_advantage


def _build_advantage(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def compute_advantage_for_multi_trajectories(data: Any, batch_keys: Any, *args: Any, **kwargs: Any) -> Any:
        from scalerl_verl.advantage.step import fold_row_weights, prepare_rows

        prepare_rows(data, batch_keys)
        return fold_row_weights(original(data, batch_keys, *args, **kwargs))

    return compute_advantage_for_multi_trajectories


def _build_balance(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def _balance_batch(
        self: Any, batch: Any, metrics: dict, logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> Any:
        from scalerl_verl.advantage.verl_optimizer_steps import balance_steps

        balanced = balance_steps(self, batch, metrics, logging_prefix)
        return original(self, batch, metrics, logging_prefix, keep_minibatch) if balanced is None else balanced

    return _balance_batch


def _build_update(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def _update_actor(self: Any, batch: Any, metrics: dict) -> Any:
        from scalerl_verl.advantage.verl_optimizer_steps import update_actor
        from scalerl_verl.ledger.verl import count_update

        step = getattr(self, "_scalerl_step", None)
        trained = update_actor(self, batch, metrics, step, functools.partial(original, self))
        if trained is not None:
            count_update(self, trained, step)
        return batch

    return _update_actor


SPECS = (
    PatchSpec(
        name="verl.training_step.context",
        module="verl.trainer.ppo.v1.trainer_base",
        target="PPOTrainer._compute_advantage",
        build=_build_step,
        kind="wrap",
        why="An advantage estimator sees neither the actor's aggregation mode nor the metrics of the step.",
        distribution="verl",
        versions=_VERSIONS,
        sources=("30cc1f82129d7b980fc1de0ea85e7a0fc09ed77f0b483b2f68360b11217acffe",),
        when="named",
        removal="verl passes the whole config and a metrics dict to advantage estimators",
        late_ok=True,
    ),
    PatchSpec(
        name="verl.training_step.weights",
        module="verl.trainer.ppo.v1.trainer_base",
        target="compute_advantage_for_multi_trajectories",
        build=_build_advantage,
        kind="wrap",
        why="Group-wise weights are exact only where whole groups are visible: on the driver, after the estimator. "
        "Sessions and rewards are only there before it.",
        distribution="verl",
        versions=_VERSIONS,
        sources=("46c7a2240d72f694b8e836a74943a7b7c340ea5bd16e579b578fbf1b4802b0fe",),
        when="named",
        removal="verl has a prompt-level aggregation mode (see patches/verl)",
    ),
    PatchSpec(
        name="verl.training_step.whole_prompts",
        module="verl.trainer.ppo.v1.trainer_base",
        target="PPOTrainer._balance_batch",
        build=_build_balance,
        kind="wrap",
        why="Rows are divided among ranks by length alone, and each rank's rows into mini-batches: with several of "
        "both an optimizer step sees parts of prompts, so that none is an average over prompts.",
        distribution="verl",
        versions=_VERSIONS,
        sources=("5b473168eff54f0a3b9c6e10ebdc5ae1cd003ac40669b625195a98d3a17e4b88",),
        when="named",
        removal="verl keeps the rows of a prompt in one mini-batch",
        late_ok=True,
    ),
    PatchSpec(
        name="verl.training_step.skip_empty",
        module="verl.trainer.ppo.v1.trainer_base",
        target="PPOTrainer._update_actor",
        build=_build_update,
        kind="wrap",
        why="When every group has zero variance there is no gradient; the optimizer must not step all the same. Sums "
        "over the optimizer steps of a batch come out as averages.",
        distribution="verl",
        versions=_VERSIONS,
        sources=("5d02854a88ff4d41eec62b180a30f88d9e544c28b2ce6f7695edd7a7acd8000b",),
        when="named",
        removal="verl skips the actor update when no sequence trains",
        late_ok=True,
    ),
)
