# SPDX-License-Identifier: Apache-2.0
"""``trainer.v1.trainer_mode=pipeline_rl``: verl's V1 training loop over generators that never stop.

It extends verl's base trainer, not the trainer of separate_async, which aborts and resumes requests at a weight update
and lends the trainer's GPUs to generation: this mode does neither.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
import transfer_queue as tq
from omegaconf import DictConfig
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer

from scalerl_verl.columns import MAX_AGE, VERSION, VERSIONS, queue_rows, read_group_sizes
from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.names import LOSS_MODE, MODEL, PIPELINE_RL, TRAINER_MODE
from scalerl_verl.pipeline.admission import AdmissionRule
from scalerl_verl.pipeline.batch import measure_batch
from scalerl_verl.pipeline.failures import WAITING_TAG
from scalerl_verl.pipeline.filtering import make_filter
from scalerl_verl.pipeline.groups import GroupWatch
from scalerl_verl.pipeline.lead import Lead
from scalerl_verl.pipeline.settings import pipeline_settings
from scalerl_verl.upstream.registry import require_checked_run


class PPOTrainerPipelineRL(PPOTrainer):
    """PipelineRL-k: one optimizer step a version, versions go out at once, no data older than k versions."""

    _enable_hybrid_replicas = False  # read by verl's base class: no inference engine on the training devices

    def __init__(self, config: DictConfig) -> None:
        require_checked_run(f"{TRAINER_MODE}={PIPELINE_RL}")
        self._settings = pipeline_settings(config)
        self._loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
        self._wait_s = 0.0
        self._step_ended_at: float | None = None
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        from scalerl_verl.pipeline.sending import SendingWorker

        self.role_worker_mapping[Role.Actor] = ray.remote(SendingWorker)

    def _build_replay_buffer(self) -> Any:
        from scalerl_verl.pipeline.buffer import PipelineReplayBuffer

        settings, sampler = self._settings, self.config.trainer.v1.sampler
        # A group has its requests' attempts one after the other, in every turn, and some time for rewards.
        num_turns = self.config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns or 1
        group_timeout_s = (num_turns * settings.max_attempts + 1) * settings.request_timeout_s
        rule = AdmissionRule(self.config.data.train_batch_size, settings.max_staleness)
        return PipelineReplayBuffer(
            rule,
            group_size=self.config.actor_rollout_ref.rollout.n,
            watch=GroupWatch(settings.max_attempts, group_timeout_s),
            admit=self._add_prompts_to_generate,
            reissue=self._reissue_groups,
            check_generators=lambda: self.weight_updater.check_generators(),
            num_steps=lambda: self.total_training_steps,
            lead=Lead(rule) if settings.adapts_lead else None,
            group_filter=make_filter(self.config),
            note_rejected=self.note_rejected,
            trainer_mode=self.trainer_mode,
            trainer_config=self.config.trainer.v1.pipeline_rl,
            # Staleness is the rule's business: verl's own limit is off.
            max_off_policy_threshold=None,
            max_off_policy_strategy="wait",
            sampler_kwargs=sampler.sampler_kwargs,
        )

    def _setup(self) -> None:
        super()._setup()
        if self.processor is not None:
            raise ScaleRLConfigError(
                [
                    f"{MODEL}.path is a multimodal model: vLLM's encoder cache does not know weight versions, so "
                    f"{TRAINER_MODE}={PIPELINE_RL} takes text models only; use another trainer_mode"
                ]
            )
        from scalerl_verl.pipeline.balancer import PipelineBalancer
        from scalerl_verl.pipeline.server import PipelineServerManager
        from scalerl_verl.pipeline.weights import WeightUpdater

        self.rollout_servers = PipelineServerManager.create(config=self.config, load_balancer_cls=PipelineBalancer)
        self.weight_updater = WeightUpdater(
            config=omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine),
            actor_wg=self.actor_rollout_wg,
            replicas=self.rollout_servers.get_replicas(),
            settings=self._settings,
            on_lost=self._remove_from_balancer,
            serving=lambda: ray.get(self.rollout_servers.global_load_balancer.get_all_servers.remote()),
            on_returned=self._add_to_balancer,
            launch=self.rollout_servers.launch_again,
        )

    def _remove_from_balancer(self, replicas: Sequence[Any]) -> None:
        addresses = [replica.server_address for replica in replicas]
        ray.get(self.rollout_servers.global_load_balancer.remove_servers.remote(addresses))

    def _add_to_balancer(self, replicas: Sequence[Any]) -> None:
        servers = {replica.server_address: replica.server_handle for replica in replicas}
        ray.get(self.rollout_servers.global_load_balancer.add_servers.remote(servers))

    def get_llm_client(self) -> Any:
        """The agent loops' client."""
        from scalerl_verl.pipeline.client import PipelineClient

        return self.rollout_servers.get_client(client_cls=PipelineClient)

    def _rollout_server_managers(self) -> list:
        return [self.rollout_servers]

    def _get_n_gpus_for_throughput(self) -> int:
        rollout = self.config.actor_rollout_ref.rollout
        return int(self.resource_pool_manager.get_n_gpus() + rollout.nnodes * rollout.n_gpus_per_node)

    def on_init_end(self) -> None:
        """The generators get the first (or the resumed) version."""
        if self.config.actor_rollout_ref.actor.policy_loss.loss_mode != self._loss_mode:
            raise ScaleRLConfigError(
                [
                    f"verl replaced {LOSS_MODE}={self._loss_mode} by "
                    f"{self.config.actor_rollout_ref.actor.policy_loss.loss_mode}: report this verl version"
                ]
            )
        self.weight_updater.update_weights(self.global_steps)
        _clear_orphans()

    def note_rejected(self, batch: Any, num_sampled: Sequence[int]) -> None:
        """Rows of groups that dynamic sampling gives up; what learns from every response overrides it."""

    def prepare_step(self) -> dict:
        """Start what the rule allows under the version that is about to be trained."""
        self.replay_buffer.top_up(self.global_steps)
        return {}

    def on_step_begin(self) -> None:
        if self._step_ended_at is None:
            self._step_ended_at = time.perf_counter()

    def on_sample_begin(self) -> None:
        self._wait_s = -time.perf_counter()

    def on_sample_end(self) -> None:
        self._wait_s += time.perf_counter()

    def measure(self, extras: Sequence[Mapping[str, Any]], num_sampled: Sequence[int]) -> dict[str, float]:
        """Check that no token of the batch is too old, and say how old they are.

        Args:
            extras: what the agent loop recorded of each row, without padding rows, which are copies.
            num_sampled: tokens of each of these rows that were sampled.

        Returns:
            As of `measure_batch`.
        """
        rows = [(extra.get(VERSIONS), count) for extra, count in zip(extras, num_sampled, strict=True)]
        reissues = [int(extra.get("reissues", 0)) for extra in extras]
        return measure_batch(rows, self.global_steps - 1, self._settings.max_staleness, reissues)

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        """verl's; the workers learn how old the tokens of their rows are."""
        batch.extra_info.update({VERSION: self.global_steps - 1, MAX_AGE: self._settings.max_staleness})
        return super()._update_actor(batch, metrics)

    def on_step_end(self) -> None:
        """The new version goes to the generators, which go on meanwhile."""
        if self.prev_step_profile:
            self._stop_rollout_profiling()
        with marked_timer("update_weights", self.timing_raw, color="red"):
            metrics = dict(self.weight_updater.update_weights(self.global_steps))
        now = time.perf_counter()
        assert self._step_ended_at is not None
        metrics["scalerl/pipeline/trainer_idle_fraction"] = self._wait_s / (now - self._step_ended_at)
        self._step_ended_at = now
        self._pending_sync_metrics = metrics

    def _reissue_inflight_prompts(self, partition_id: str = "train") -> int:
        """Do nothing: the replay buffer starts them at its first call, as many as the rule allows in this run."""
        return 0

    def _submit_batch_to_rollout(self, batch: Any) -> int:
        """verl's; the replay buffer learns how many responses each prompt asks for."""
        sizes = read_group_sizes(batch, list(batch["uid"]))
        if sizes:
            self.replay_buffer.note_group_sizes(sizes)
        return int(super()._submit_batch_to_rollout(batch))

    def _reissue_groups(self, uids: list[str]) -> list[str]:
        """Start groups again from their stored prompts, under new ids: an old attempt that comes back finds nothing.

        Returns:
            The new ids, in the order of the old ones.
        """
        batch = tq.kv_batch_get(keys=uids, partition_id="train")
        new = [str(uuid.uuid4()) for _ in uids]
        batch.pop("uid", None)
        fresh = {"uid": np.array(new, dtype=object)}
        batch = tu.get_tensordict({**{key: batch[key] for key in batch.keys()}, **fresh})  # noqa: SIM118
        tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        self._submit_batch_to_rollout(batch)
        return new


def _clear_orphans() -> None:
    """Drop rows of a restored queue whose prompt is not there any more: they trained before the checkpoint was made."""
    rows = queue_rows("train")
    prompts = {key for key, tag in rows.items() if tag.get("is_prompt", False) or tag.get(WAITING_TAG, False)}
    orphans = [key for key in rows if key not in prompts and key.split("_", 1)[0] not in prompts]
    if orphans:
        tq.kv_clear(keys=orphans, partition_id="train")
