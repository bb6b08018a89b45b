# SPDX-License-Identifier: Apache-2.0
"""Weights from the trainer to generators that go on: one process group, a staging buffer, a short pause."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray.base import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.ray_utils import auto_await

from scalerl_verl.errors import GeneratorsLostError, WeightSyncError
from scalerl_verl.pipeline.settings import PipelineSettings

logger = logging.getLogger(__name__)
HEALTH_TIMEOUT_S = 60.0
"""Seconds in which a living server answers a question that takes it no work."""


class StagingWorker(CheckpointEngineWorker):
    """verl's rollout worker in two steps: weights are received while the engine generates, and loaded later."""

    _staged: list[tuple[str, torch.Tensor]] | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def stage_weights(self, staging: str, global_steps: int) -> None:
        """Receive all weights into ``device`` or ``host`` memory.

        Raises:
            WeightSyncError: they do not fit beside vLLM.
        """
        staged = []
        try:
            async for name, weight in self.checkpoint_engine.receive_weights(global_steps=global_steps):
                # The engine reuses its buffers: what is kept has to be a copy.
                staged.append((name, weight.to("cpu", copy=True) if staging == "host" else weight.clone()))
        except torch.cuda.OutOfMemoryError as error:
            raise WeightSyncError(
                "a second copy of the model does not fit on the generator's device beside vLLM: lower "
                "actor_rollout_ref.rollout.gpu_memory_utilization, or set trainer.v1.pipeline_rl.staging=host (or none)"
            ) from error
        self._staged = staged

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def load_staged(self, global_steps: int) -> None:
        """Load what `stage_weights` received into the paused engine."""
        assert self._staged is not None, "load_staged without stage_weights"
        staged, self._staged = self._staged, None
        await self.server_adapter.update_weights(iter(staged), global_steps=global_steps)


class WeightUpdater(CheckpointEngineManager):
    """Hands each version to all generators without aborting a request; leaves out those that died.

    Args:
        config: verl's checkpoint-engine config.
        actor_wg: the trainer's workers.
        replicas: the generators.
        settings: ours.
        on_lost: called with the replicas that are found dead.
    """

    def __init__(
        self,
        config: Any,
        actor_wg: RayWorkerGroup,
        replicas: list[Any],
        settings: PipelineSettings,
        on_lost: Callable[[Sequence[Any]], None],
    ) -> None:
        super().__init__(config=config, actor_wg=actor_wg, replicas=list(replicas))
        self._settings = settings
        self._on_lost = on_lost
        self._rollout: Any = None  # verl's worker group over all generators, while their process group stands
        self.num_groups_built = 0

    @auto_await
    async def update_weights(self, global_steps: int) -> dict[str, float]:
        """Bring version ``global_steps`` to every generator.

        Returns:
            Metrics under ``scalerl/pipeline/``.

        Raises:
            GeneratorsLostError: no generator is left.
            WeightSyncError: a living generator could not take the weights, or the transfer hangs although all live.
        """
        await self._leave_out_dead()
        try:
            return await self._update(global_steps)
        except Exception:
            # A peer that dies in the middle fails the collective for all; once it is out, the rest can go on.
            if not await self._leave_out_dead():
                raise
            logger.exception("a generator died during the update to version %d; trying without it", global_steps)
            return await self._update(global_steps)

    @auto_await
    async def check_generators(self) -> None:
        """Leave out generators that died.

        Raises:
            GeneratorsLostError: no generator is left.
        """
        await self._leave_out_dead()

    async def _update(self, version: int) -> dict[str, float]:
        if self._rollout is None:
            self._build_group()
        started = time.perf_counter()
        if self._settings.staging == "none":
            await asyncio.gather(*[replica.servers[0].pause_keep.remote() for replica in self.replicas])
            sent = await self._transfer(self._rollout.update_weights(global_steps=version), version)
            transfer_s = time.perf_counter() - started
            updates = await asyncio.gather(*[self._finish(replica, version) for replica in self.replicas])
            swaps = [transfer_s] * len(updates)
        else:
            staged = self._rollout.stage_weights(self._settings.staging, global_steps=version)
            sent = await self._transfer(staged, version)
            transfer_s = time.perf_counter() - started
            # To its end on every generator that lives, also when one dies: none may stay paused.
            results = await asyncio.gather(
                *[self._swap(replica, version) for replica in self.replicas], return_exceptions=True
            )
            swaps, updates = [], []
            for result in results:
                if isinstance(result, BaseException):
                    raise result
                swaps.append(result[0])
                updates.append(result[1])
        return {**sent, **_summarise(updates, swaps, transfer_s)}

    def _build_group(self) -> None:
        workers = [worker for replica in self.replicas for worker in replica.workers]
        cls = RayClassWithInitArgs(cls=ray.remote(StagingWorker))
        self._rollout = RayWorkerGroup(worker_handles=workers, ray_cls_with_init=cls)
        self.build_process_group(self._rollout)
        self.num_groups_built += 1

    async def _transfer(self, receiving: list[Any], version: int) -> dict[str, float]:
        sending = self.actor_wg.update_weights(global_steps=version, mode=self.backend)
        results = await self._within_limit(f"the transfer of version {version}", sending, receiving)
        metrics: dict[str, float] = {}
        for result in results[: self.actor_wg.world_size]:
            metrics.update(result or {})
        return metrics

    async def _within_limit(self, what: str, trainers: Sequence[Any], generators: Sequence[Any]) -> list[Any]:
        """Results of calls to every trainer rank and every generator's worker, which take part in one collective.

        Raises:
            WeightSyncError: some have not ended in time; names them. What is hung in a collective cannot be ended.
        """
        workers = [replica.replica_rank for replica in self.replicas for _ in replica.workers]
        names = [f"trainer rank {rank}" for rank in range(len(trainers))] + [f"generator {rank}" for rank in workers]
        limit_s = self._settings.transfer_timeout_s
        tasks = [asyncio.ensure_future(_as_awaitable(ref)) for ref in [*trainers, *generators]]
        done, hung = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in hung:
            task.cancel()
        errors = [error for task in tasks if task in done and (error := task.exception()) is not None]
        if errors:
            raise errors[0]
        if hung:
            late = ", ".join(name for name, task in zip(names, tasks, strict=True) if task in hung)
            raise WeightSyncError(
                f"{what} has not ended within trainer.v1.pipeline_rl.transfer_timeout_s={limit_s:g}; still in it: "
                f"{late}. Look for the first error of those and at the network between their nodes; raise the limit if "
                "the model takes longer; trainer.resume_mode=auto goes on from the last checkpoint"
            )
        return [task.result() for task in tasks]

    async def _swap(self, replica: Any, version: int) -> tuple[float, dict[str, float]]:
        await replica.servers[0].pause_keep.remote()
        started = time.perf_counter()
        await asyncio.gather(*[worker.load_staged.remote(global_steps=version) for worker in replica.workers])
        swap_s = time.perf_counter() - started
        return swap_s, await self._finish(replica, version)

    async def _finish(self, replica: Any, version: int) -> dict[str, float]:
        recompute = self._settings.kv_on_update == "recompute"
        return dict(await replica.servers[0].finish_update.remote(version, recompute))

    async def _leave_out_dead(self) -> bool:
        """Take replicas that do not answer out of the group; whether there were any."""
        answers = await asyncio.gather(*[self._is_alive(replica) for replica in self.replicas])
        dead = [replica for replica, alive in zip(self.replicas, answers, strict=True) if not alive]
        if not dead:
            return False
        self.remove_replicas(dead)
        self._on_lost(dead)
        if not self.replicas:
            raise GeneratorsLostError("every generator of this run is dead; look for the first error of a vLLM engine")
        if self._rollout is not None:
            await self._forget_group()
        return True

    async def _forget_group(self) -> None:
        """End the group on those that live; the next update builds one without the dead.

        verl's NCCL engine does so with ``rebuild_group=True`` only, which the start-up check asks for.
        """
        workers = [worker for replica in self.replicas for worker in replica.workers]
        generators = [worker.execute_checkpoint_engine.remote("finalize") for worker in workers]
        trainers = self.actor_wg.execute_checkpoint_engine(["finalize"] * self.actor_wg.world_size)
        await self._within_limit("ending the process group of a dead generator", trainers, generators)
        self._rollout = None

    async def _is_alive(self, replica: Any) -> bool:
        questions = [server.check_alive.remote() for server in replica.servers]
        questions += [worker.get_replica_rank.remote() for worker in replica.workers]
        try:
            await asyncio.wait_for(asyncio.gather(*map(_as_awaitable, questions)), HEALTH_TIMEOUT_S)
        except (ray.exceptions.RayError, asyncio.TimeoutError) as error:
            logger.warning("generator %s is lost: %s", replica.replica_rank, str(error).strip().splitlines()[-1:])
            return False
        return True


async def _as_awaitable(ref: Awaitable[Any]) -> Any:
    return await ref


def _summarise(updates: list[dict[str, float]], swaps: list[float], transfer_s: float) -> dict[str, float]:
    def total(key: str) -> float:
        return float(sum(update[key] for update in updates))

    prefix = "scalerl/pipeline"
    return {
        f"{prefix}/transfer_s": transfer_s,
        f"{prefix}/swap_s": max(swaps),
        f"{prefix}/pause_s": max(update["pause_s"] for update in updates),
        f"{prefix}/kept_requests": total("kept_requests"),
        f"{prefix}/recomputed_tokens": total("recomputed_tokens"),
        f"{prefix}/tokens_lost": total("tokens_lost"),
        f"{prefix}/generated_tokens": total("generated_tokens"),
        f"{prefix}/generator_idle_fraction": total("idle_s") / max(total("wall_s"), 1e-9),
        f"{prefix}/replicas": float(len(updates)),
    }
