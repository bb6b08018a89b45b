# SPDX-License-Identifier: Apache-2.0
"""A training step with our pieces: what they add before and after each method of verl's V1 trainers (driver).

`ScaleRLTrainer` stands in front of verl's trainer of each mode, and of our own: where it says ``super()``, they act.
verl calls the methods in about the order in which they stand here:

    __init__, init (_init_dataloader, _load_checkpoint), then per step
    step (_balance_batch, _compute_old_log_prob, _compute_advantage, _update_actor), _save_checkpoint, _validate,
    _compute_metrics
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import ray
from omegaconf import DictConfig
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from scalerl_verl.advantage import length_step
from scalerl_verl.advantage.shaping_step import read_shapings
from scalerl_verl.advantage.step import advantage_step
from scalerl_verl.advantage.verl_optimizer_steps import balance_steps, update_actor
from scalerl_verl.curriculum.verl import (
    add_visits,
    find_sampler,
    record_visits,
    tally_rejected,
    warn_of_few_problems,
    with_sampler,
)
from scalerl_verl.errors import PatchError
from scalerl_verl.generator import frontend
from scalerl_verl.head.verl_first_batch import probe_first_batch, probe_sides
from scalerl_verl.ledger import verl as ledgers
from scalerl_verl.loss.term_weights import write_weights
from scalerl_verl.loss.terms import WEIGHTED, active_terms
from scalerl_verl.loss.verl_config import statistics_mode
from scalerl_verl.names import PIPELINE_RL, POLL_INTERVAL_KEY, PPO_OFF_POLICY, TRAINER_MODE, select
from scalerl_verl.names.asking import is_cpu_platform
from scalerl_verl.pipeline.mode_change import hand_over_queue
from scalerl_verl.pipeline.off_policy import PPOTrainerOffPolicy
from scalerl_verl.pipeline.trainer import PPOTrainerPipelineRL
from scalerl_verl.upstream.nodes import check_nodes
from scalerl_verl.verl.doors import TRAINERS, restore_mode
from scalerl_verl.verl.run_state import RunState

_Behind: Any = object
"""verl's trainer of some mode, which a class below has behind this one."""


class ScaleRLTrainer(_Behind):
    """In front of a trainer of verl's; what it keeps of the run is in ``scalerl``."""

    train_dataloader: Any

    def __init__(self, config: DictConfig) -> None:
        check_nodes()
        restore_mode(config)
        super().__init__(config)
        self.scalerl = RunState.start(config)  # the clock starts: what follows takes the GPUs

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()
        interval = (self.config.trainer.v1.sampler.sampler_kwargs or {}).get(POLL_INTERVAL_KEY)
        if interval is not None and isinstance(buffer, ReplayBuffer):
            buffer.poll_interval = float(interval)  # verl has no key for its 2 s, the step time of a small model
        return buffer

    def init(self) -> None:
        """Start all that the run needs; look at the class of the servers, and compare the heads of both sides."""
        super().init()
        frontend.check_replicas(self)
        self.scalerl.first_version = probe_sides(self)

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        """Start fresh prompts; in verl's asynchronous modes some of them take the place of failed ones."""
        if select(self.config, TRAINER_MODE) != PIPELINE_RL:  # which goes on without a generator that died
            self.scalerl.engines.look(self)
        return int(super()._add_prompts_to_generate(num_prompts))

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        self.train_dataloader = with_sampler(self.train_dataloader, self.config.data)
        warn_of_few_problems(self)

    def _load_checkpoint(self) -> Any:
        result = super()._load_checkpoint()
        ledger = self.scalerl.ledger
        if ledger is not None:
            folder = ledgers.resumed_folder(self)
            ledger.restore(folder, self.global_steps)
            length_step.restore_alarm(self.scalerl.alarm, self.config, folder)
            hand_over_queue(self, folder)
            ledger.prompts.mark(self.val_dataset, self.config.data)
        return result

    def step(self, metrics: dict, timing_raw: dict) -> Any:
        """One training step; its metrics are kept for its checkpoint, which verl marks as the latest before it logs."""
        batch = super().step(metrics, timing_raw)
        if self.scalerl.ledger is not None:
            self.scalerl.ledger.step_metrics = metrics
        return batch

    def _balance_batch(
        self, batch: Any, metrics: dict, logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> Any:
        balanced, self.scalerl.division = balance_steps(self, batch, metrics, logging_prefix)
        if self.scalerl.division is not None:
            return balanced
        return super()._balance_batch(batch, metrics, logging_prefix, keep_minibatch)

    def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
        with statistics_mode(self.config):
            batch = super()._compute_old_log_prob(batch, metrics)
        version, self.scalerl.first_version = self.scalerl.first_version, None
        probe_first_batch(self, batch, metrics, version)
        return batch

    def note_rejected(self, batch: Any, num_sampled: Sequence[int]) -> None:
        """Called by pipeline_rl with the rows of groups that dynamic sampling gives up: no step will see them."""
        if find_sampler(self) is not None:
            add_visits(self.scalerl.rejected, tally_rejected(self.config, batch, num_sampled))

    def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
        state, sampler, watched = self.scalerl, find_sampler(self), length_step.watches_lengths(self.config)
        with advantage_step(self.config, metrics) as step:
            step.config, step.batch, step.shapings = self.config, batch, read_shapings(self.config)
            step.rows_of_steps = None if state.division is None else state.division.rows()
            step.keep_rewards = sampler is not None or watched
            if step.shapings:
                step.max_response_length = int(self.config.data.max_response_length)
            result = super()._compute_advantage(batch, metrics)
        if step.weights_B is not None and active_terms(self.config, WEIGHTED):
            result = write_weights(result, step.weights_B)
        step.count_outcomes()
        if sampler is not None:
            record_visits(sampler, batch, step, state.rejected)
            state.rejected = {}
        ledgers.count_batch(state.ledger, self, batch, step)
        if watched:
            length_step.record_lengths(state.alarm, self.config, batch, step)
        state.step = step
        return result

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        state = self.scalerl
        trained = update_actor(self.config, batch, metrics, state.step, state.division, super()._update_actor)
        if trained is not None:
            state.ratios.observe(metrics)
            ledgers.count_update(state.ledger, trained, state.step)
        return batch

    def _save_checkpoint(self) -> Any:
        ledger = self.scalerl.ledger
        if ledger is None:
            return super()._save_checkpoint()
        folder = os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        # Before: a checkpoint that verl has marked as the latest is never without it. After: with the time of saving.
        ledger.keep_step(folder, self.global_steps)
        ledger.save(folder)
        length_step.save_alarm(self.scalerl.alarm, self.config, folder)
        result = super()._save_checkpoint()
        ledger.save(folder)
        return result

    def _validate(self) -> Any:
        ledger = self.scalerl.ledger
        if ledger is None:
            return super()._validate()
        ledgers.begin_validation(ledger, self.global_steps)
        with ledger.prompts.watch(self), length_step.watch_validation(self.config, self.replay_buffer) as lengths:
            self.scalerl.validation = lengths
            metrics = super()._validate()
            if lengths is not None:
                metrics.update(lengths.metrics(ledger.prompts.of))
        self.scalerl.validation = None
        metrics.update(ledgers.end_validation(ledger, self.total_training_steps))
        if self.global_steps == 0 or not hasattr(self, "timing_raw"):
            ledger.before_validation = None  # no step to log: this is the validation before training
            if not ledger.only_validates:
                ledger.steps.write(self.global_steps, metrics)
        return metrics

    def _val_metrics_update(
        self, data_sources: Any, sample_uids: Any, reward_extra_infos_dict: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.scalerl.ledger is not None:
            # verl passes it by name; a validation of another kind may have none.
            expected = kwargs.get("expected_acc_counts")
            ledgers.note_samples(self.scalerl.ledger, data_sources, sample_uids, reward_extra_infos_dict, expected)
            if self.scalerl.validation is not None:
                self.scalerl.validation.note_rewards(reward_extra_infos_dict["reward"])
        return super()._val_metrics_update(data_sources, sample_uids, reward_extra_infos_dict, *args, **kwargs)

    def _compute_metrics(self, batch: Any, metrics: Any, timing_raw: Any, global_steps: Any, epoch: Any) -> Any:
        result = super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        if self.scalerl.ledger is not None:
            ledgers.log_step(self.scalerl.ledger, metrics, global_steps)
        return result


@register_trainer(TRAINERS["sync"])
class ScaleRLSync(ScaleRLTrainer, PPOTrainerSync):
    """``trainer_mode=sync``."""


@register_trainer(TRAINERS["colocate_async"])
class ScaleRLColocateAsync(ScaleRLTrainer, PPOTrainerColocateAsync):
    """``trainer_mode=colocate_async``."""


@register_trainer(TRAINERS["separate_async"])
class ScaleRLSeparateAsync(ScaleRLTrainer, PPOTrainerSeparateAsync):
    """``trainer_mode=separate_async``."""

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if is_cpu_platform():
            from scalerl_verl.cpu.verl_worker import CopyingWorker, DetachActorWorker

            for role, worker in self.role_worker_mapping.items():
                if worker.__ray_actor_class__ is DetachActorWorker:
                    self.role_worker_mapping[role] = ray.remote(CopyingWorker)

    def _setup(self) -> None:
        if self._enable_hybrid_replicas:
            super()._setup()
            return
        # verl's last line hands print's `flush` to its logger: a TypeError as soon as INFO is enabled.
        logger = logging.getLogger(PPOTrainerSeparateAsync.__module__)
        level = logger.level
        logger.setLevel(logging.WARNING)
        try:
            super()._setup()
        finally:
            logger.setLevel(level)
        logger.info("[V1SepAsync] hybrid replicas disabled: rollout served by standalone replicas only")


@register_trainer(PIPELINE_RL)
class ScaleRLPipeline(ScaleRLTrainer, PPOTrainerPipelineRL):
    """``trainer_mode=pipeline_rl``."""

    def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
        result = super()._compute_advantage(batch, metrics)
        step = self.scalerl.step
        assert step is not None, "the step is kept when its advantages are computed"
        metrics.update(self.measure(*step.sampled_rows()))
        return result


@register_trainer(PPO_OFF_POLICY)
class ScaleRLOffPolicy(ScaleRLTrainer, PPOTrainerOffPolicy):
    """``trainer_mode=ppo_off_policy``."""


def require_our_trainer(config: Any) -> None:
    """Refuse a run whose trainer is not one of ours: its loss would lack weights that our steps put into the batch.

    Args:
        config: the run's, after its trainer was made.

    Raises:
        PatchError: another one was made, or a mode of a user's has a trainer without `ScaleRLTrainer`.
    """
    mode = select(config, TRAINER_MODE)
    theirs = None if mode in TRAINERS else TRAINER_REGISTRY.get(mode)
    if mode in TRAINERS.values() or (theirs is not None and not issubclass(theirs, ScaleRLTrainer)):
        made = "another class" if theirs is None else theirs.__name__
        raise PatchError(
            f"the trainer of this run ({made}) lacks the steps of scalerl_verl: make {ScaleRLTrainer.__module__}."
            f"{ScaleRLTrainer.__name__} the first base class of your own trainer, or launch through python -m "
            f"verl.trainer.main_ppo with {TRAINER_MODE} {', '.join(TRAINERS)}, {PIPELINE_RL} or {PPO_OFF_POLICY}, or "
            "remove our names"
        )
