# SPDX-License-Identifier: Apache-2.0
"""Weights from the trainer to generators that go on: one process group, a staging buffer, a pause for the swap."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray.base import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.ray_utils import auto_await

from scalerl_verl.errors import GeneratorsLostError, WeightSyncError
from scalerl_verl.names import DEVICE, GLOO, HOST, MAX_RELAUNCHES, NONE, ROLLOUT, STAGING, TRANSFER_TIMEOUT
from scalerl_verl.pipeline.copies import StagedCopies
from scalerl_verl.pipeline.endable import EndableSocket
from scalerl_verl.pipeline.failures import as_coroutine, is_unreachable, strike_pause_s
from scalerl_verl.pipeline.relaunching import LOOK_S, Relauncher
from scalerl_verl.pipeline.returning import LeftOut
from scalerl_verl.pipeline.settings import PipelineSettings
from scalerl_verl.pipeline.staging import StagingBuffer

logger = logging.getLogger(__name__)
HEALTH_TIMEOUT_S = 60.0
"""Seconds in which a living server answers a question that takes it no work."""


class StagingWorker(CheckpointEngineWorker):
    """verl's rollout worker that can also receive weights without loading them: the engine goes on generating."""

    _staging: StagingBuffer | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def stage_weights(
        self, staging: str, known: frozenset[str], sharers: frozenset[int], global_steps: int
    ) -> tuple[str, bytes]:
        """Receive all weights into memory that vLLM's worker shares.

        Every rank of an engine receives all weights. On the device each keeps them for itself; in host memory the
        first rank of one engine a node keeps them for all.

        Args:
            staging: ``device`` or ``host``.
            known: ids of layouts that need not be told again.
            sharers: numbers of the generators that load what another one keeps.
            global_steps: the version.

        Returns:
            Id of the layout, and the layout itself unless its id is in ``known``; both empty of a rank that kept none.

        Raises:
            WeightSyncError: they do not fit beside vLLM.
        """
        if self.server_adapter.replica_rank in sharers or (staging == HOST and self.server_adapter.rollout_rank > 0):
            async for _ in self.checkpoint_engine.receive_weights(global_steps=global_steps):
                pass
            return "", b""
        if self._staging is None:
            self._staging = StagingBuffer(on_device=staging == DEVICE)
        self._staging.begin()
        try:
            async for name, weight in self.checkpoint_engine.receive_weights(global_steps=global_steps):
                self._staging.put(name, weight)
        except torch.cuda.OutOfMemoryError as error:
            raise WeightSyncError(
                "a second copy of the model does not fit on the generator's device beside vLLM: lower "
                f"{ROLLOUT}.gpu_memory_utilization, or set {STAGING}=host (or "
                "none); scalerl plan says how much it takes"
            ) from error
        layout = self._staging.finish()
        return self._staging.layout_id, b"" if self._staging.layout_id in known else layout

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """verl's; what still waits for a bucket of a transfer that failed is out of the way of the next one."""
        engine = self.checkpoint_engine
        if method == "finalize" and isinstance(socket := getattr(engine, "socket", None), EndableSocket):
            socket.end()
        result = super().execute_checkpoint_engine(method, *args, **kwargs)
        if method == "init_process_group" and getattr(engine, "socket", None) is not None:
            engine.socket = EndableSocket(engine.socket)
        return result

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_node(self) -> str:
        """Ray's id of the node on which this process runs."""
        return str(ray.get_runtime_context().get_node_id())


class WeightUpdater(CheckpointEngineManager):
    """Hands each version to all generators without aborting a request; leaves out those that died or are out of reach.

    Args:
        config: verl's checkpoint-engine config.
        actor_wg: the trainer's workers.
        replicas: the generators.
        settings: ours.
        on_lost: called with the replicas that are left out.
        serving: addresses to which requests still go; None: all. A replica that gets none has no business here either.
        on_returned: called with replicas that were left out or launched anew, and hold the current weights.
        launch: launches a replica in the place of a dead one (`Relauncher`); None: nobody does.
    """

    _serving: Callable[[], Collection[str]] | None = None

    def __init__(
        self,
        config: Any,
        actor_wg: RayWorkerGroup,
        replicas: list[Any],
        settings: PipelineSettings,
        on_lost: Callable[[Sequence[Any]], None],
        serving: Callable[[], Collection[str]] | None = None,
        on_returned: Callable[[Sequence[Any]], None] = lambda replicas: None,
        launch: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(config=config, actor_wg=actor_wg, replicas=list(replicas))
        self._settings = settings
        # gloo delivers into host memory, whatever is asked for.
        self._staging = HOST if self.backend == GLOO and settings.staging == DEVICE else settings.staging
        self._on_lost = on_lost
        self._serving = serving
        self._on_returned = on_returned
        self._relauncher = Relauncher(launch or (lambda replica: None), settings.max_relaunches if launch else 0)
        self._left_out = LeftOut(settings.max_strikes, settings.transfer_timeout_s, self._relauncher.start)
        self._version = 0  # that generators hold, or should
        self._returning: list[Any] = []  # they take part in the next update, and get no requests before
        self._rollout: Any = None  # verl's worker group over all generators, while their process group stands
        self._copies = StagedCopies()
        self._sending: list[asyncio.Future[Any]] = []  # the trainer's ranks, while they may be in a transfer
        self._hung: set[int] = set()  # ranks of generators that did not end their part of an update

    @auto_await
    async def update_weights(self, global_steps: int) -> dict[str, float]:
        """Bring version ``global_steps`` to every generator.

        Returns:
            Metrics under ``scalerl/pipeline/``.

        Raises:
            GeneratorsLostError: no generator is left.
            WeightSyncError: a living generator could not take the weights, or the transfer hangs although all live.
        """
        self._version = global_steps
        await self._leave_out_dead()
        await self._take_back()
        return await self._bring(global_steps)

    async def _bring(self, global_steps: int) -> dict[str, float]:
        strikes = 0
        while True:
            try:
                metrics = await self._update(global_steps)
                if self._returning:
                    self._on_returned(self._returning)
                    self._returning = []
                return metrics
            except Exception as error:
                strikes += 1
                # A peer that dies in the middle fails the collective for all; once it is out, the rest can go on.
                if await self._leave_out_dead():
                    logger.exception("a generator was lost in the update to version %d; again without it", global_steps)
                elif is_unreachable(error) and strikes < self._settings.max_strikes:
                    logger.exception("a generator was out of reach in the update to version %d; again", global_steps)
                    if self._rollout is not None:  # others may still be in its collective
                        await self._forget_group()
                else:
                    raise

    @auto_await
    async def check_generators(self) -> None:
        """Leave out dead generators and take back those that answer again; if none was left, they get weights at once.

        Raises:
            GeneratorsLostError: no generator is left.
        """
        await self._leave_out_dead()
        await self._take_back()
        if len(self._returning) == len(self.replicas):
            await self._bring(self._version)

    async def _update(self, version: int) -> dict[str, float]:
        if self._rollout is None:
            await self._build_group()
        started = time.perf_counter()
        if self._settings.staging == NONE:
            pauses = [as_coroutine(replica.servers[0].pause_keep.remote()) for replica in self.replicas]
            await self._by_every_generator("the pause", pauses)
            sent, _ = await self._transfer(self._rollout.update_weights(global_steps=version), version)
            transfer_s = time.perf_counter() - started
            finishing = [self._finish(replica, version) for replica in self.replicas]
            updates = await self._by_every_generator(f"the swap to version {version}", finishing)
            updates = [{**update, "swap_s": transfer_s} for update in updates]
        else:
            copies = self._copies
            receiving = self._rollout.stage_weights(self._staging, copies.known, copies.sharers, global_steps=version)
            sent, staged = await self._transfer(receiving, version)
            transfer_s = time.perf_counter() - started
            by_worker = iter(staged)
            copies.note_staged(
                {r.replica_rank: list(itertools.islice(by_worker, len(r.workers))) for r in self.replicas}
            )
            swaps = [self._swap(replica, version) for replica in self.replicas]
            updates = await self._by_every_generator(f"the swap to version {version}", swaps)
        return {**sent, **_summarise(updates, transfer_s)}

    async def _build_group(self) -> None:
        """verl's process group of trainer and generators.

        verl's own `build_process_group` does the same and waits for ever if a generator dies in it.
        """
        workers = [worker for replica in self.replicas for worker in replica.workers]
        if self._staging == HOST:
            # TP over several nodes is refused: all workers of an engine are on one.
            asked = [worker.get_node.remote() for worker in workers]
            nodes = await self._within_limit("asking for the nodes of the generators", [], asked)
            ranks = [replica.replica_rank for replica in self.replicas for _ in replica.workers]
            self._copies.share(dict(zip(ranks, nodes, strict=True)))
        cls = RayClassWithInitArgs(cls=ray.remote(StagingWorker))
        rollout = RayWorkerGroup(worker_handles=workers, ray_cls_with_init=cls)
        both = (self.actor_wg, rollout)
        prepared = [group.execute_checkpoint_engine(["prepare"] * group.world_size) for group in both]
        metadata = await self._within_limit("preparing the process group", *prepared)
        sizes = [group.world_size for group in both]
        roles = self.backend_cls.build_topology(*sizes, metadata)
        joining = [
            group.execute_checkpoint_engine(**{**role, "method": ["init_process_group"] * group.world_size})
            for group, role in zip(both, roles, strict=True)
        ]
        await self._within_limit("building the process group", *joining)
        self._rollout = rollout

    async def _transfer(self, receiving: list[Any], version: int) -> tuple[dict[str, float], list[Any]]:
        """The trainer's metrics and what each generator's worker returned."""
        sending = self.actor_wg.update_weights(global_steps=version, mode=self.backend)
        self._sending = [asyncio.ensure_future(as_coroutine(ref)) for ref in sending]
        shielded = [asyncio.shield(task) for task in self._sending]
        results = await self._within_limit(f"the transfer of version {version}", shielded, receiving)
        self._sending = []
        metrics: dict[str, float] = {}
        for result in results[: len(sending)]:
            metrics.update(result or {})
        return metrics, results[len(sending) :]

    async def _within_limit(self, what: str, trainers: Sequence[Any], generators: Sequence[Any]) -> list[Any]:
        """Results of calls to every trainer rank and every generator's worker, or to one of both kinds.

        Raises:
            WeightSyncError: some have not ended in time; names them. What is hung in a collective cannot be ended.
        """
        workers = [replica.replica_rank for replica in self.replicas for _ in replica.workers] if generators else []
        names = [f"trainer rank {rank}" for rank in range(len(trainers))] + [f"generator {rank}" for rank in workers]
        limit_s = self._settings.transfer_timeout_s
        tasks = [asyncio.ensure_future(as_coroutine(ref)) for ref in [*trainers, *generators]]
        done, hung = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in hung:
            task.cancel()
        errors = [error for task in tasks if task in done and (error := task.exception()) is not None]
        if errors:
            raise errors[0]
        if hung:
            late = ", ".join(name for name, task in zip(names, tasks, strict=True) if task in hung)
            raise WeightSyncError(
                f"{what} has not ended within {TRANSFER_TIMEOUT}={limit_s:g}; still in it: "
                f"{late}. Look for the first error of these processes, and check the network between their nodes. If "
                "the model needs more time, raise the limit. trainer.resume_mode=auto goes on from the last checkpoint"
            )
        return [task.result() for task in tasks]

    async def _by_every_generator(self, what: str, calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Results of a call to each generator, awaited to their ends also if one fails: none may stay paused.

        Raises:
            WeightSyncError: some have not ended within the limit of a transfer; they count as lost from here on.
        """
        limit_s = self._settings.transfer_timeout_s
        tasks = [asyncio.ensure_future(call) for call in calls]
        _, hung = await asyncio.wait(tasks, timeout=limit_s)
        for task in hung:
            task.cancel()
        ranks = [replica.replica_rank for replica, task in zip(self.replicas, tasks, strict=True) if task in hung]
        self._hung.update(ranks)
        if errors := [error for task in tasks if task not in hung and (error := task.exception()) is not None]:
            raise errors[0]
        if ranks:
            raise WeightSyncError(
                f"{what} has not ended within {TRANSFER_TIMEOUT}={limit_s:g} on generator "
                f"{', '.join(map(str, ranks))}, whose engine is hung; look for its first error, or raise the limit if "
                "a step of generation takes longer"
            )
        return [task.result() for task in tasks]

    async def _swap(self, replica: Any, version: int) -> dict[str, float]:
        layouts = self._copies.to_open(replica.replica_rank)
        update = dict(await replica.servers[0].swap.remote(version, layouts, self._settings.recomputes))
        self._copies.note_opened(replica.replica_rank)
        return update

    async def _finish(self, replica: Any, version: int) -> dict[str, float]:
        return dict(await replica.servers[0].finish_update.remote(version, self._settings.recomputes))

    async def _take_back(self) -> None:
        """Let replicas that answer again, or are new, take part in the next update, with a process group for all."""
        launched = self._relauncher.take_launched()
        for replica in launched:
            self._copies.forget(replica.replica_rank)
        returned = self._left_out.find_returned() + launched
        if not returned:
            return
        logger.warning("generators %s are back", ", ".join(str(replica.replica_rank) for replica in returned))
        self.add_replicas(returned)
        self._returning += returned
        self._hung.difference_update(replica.replica_rank for replica in returned)
        if self._rollout is not None:
            await self._forget_group()

    def _num_awaited(self) -> int:
        """Generators that may yet be there; a run that launches none ends with its last one."""
        if not self._settings.max_relaunches:
            return 0
        return self._left_out.num_asked + self._relauncher.num_under_way

    async def _wait_for_generators(self) -> None:
        """Until one is there to take part, when none is left.

        Raises:
            GeneratorsLostError: none comes back or is launched within the limit of a transfer.
        """
        began = time.monotonic()
        while not self.replicas:
            if not self._num_awaited() or time.monotonic() - began > self._settings.transfer_timeout_s:
                raise GeneratorsLostError(
                    "every generator of this run is dead, hung or out of reach, and none was launched in its place "
                    f"({MAX_RELAUNCHES}={self._settings.max_relaunches}, {TRANSFER_TIMEOUT}="
                    f"{self._settings.transfer_timeout_s:g}); look for the first error of a vLLM engine"
                )
            await asyncio.sleep(min(LOOK_S, self._settings.transfer_timeout_s))
            await self._take_back()

    async def _leave_out_dead(self) -> bool:
        """Take replicas that do not answer, or get no requests any more, out of the group; whether there were any."""
        unserving = self._find_unserving()
        answers = await asyncio.gather(*[self._is_alive(replica) for replica in self.replicas])
        alive = [replica for replica, answer in zip(self.replicas, answers, strict=True) if answer]
        dead = [replica for replica in self.replicas if replica not in alive or replica in unserving]
        if not dead:
            return False
        self.remove_replicas(dead)
        self._returning = [replica for replica in self._returning if replica not in dead]
        self._on_lost(dead)
        await asyncio.gather(*[self._give_up(replica) for replica in dead])
        self._left_out.add(dead)
        if not self.replicas and not self._num_awaited():
            await self._wait_for_generators()
        if self._rollout is not None:
            await self._forget_group()
        await self._wait_for_generators()
        return True

    def _find_unserving(self) -> list[Any]:
        if self._serving is None:
            return []
        try:
            serving = self._serving()
        except ray.exceptions.ActorUnavailableError as error:
            logger.warning("the load balancer is out of reach: %r", error)
            return []
        return [
            replica
            for replica in self.replicas
            if replica.server_address not in serving and replica not in self._returning
        ]

    async def _give_up(self, replica: Any) -> None:
        """Have a server end its requests, so that they are sent again; otherwise they would wait for their time-out."""
        try:
            await asyncio.wait_for(as_coroutine(replica.servers[0].give_up.remote()), HEALTH_TIMEOUT_S)
        except ray.exceptions.ActorDiedError:
            return  # and so are its requests
        except (ray.exceptions.RayError, asyncio.TimeoutError) as error:
            logger.warning("generator %s is left out and keeps its requests: %r", replica.replica_rank, error)

    async def _forget_group(self) -> None:
        """End the group on those that live; the next update builds one without the dead.

        Every rank of the trainer has to be out of a transfer that failed before: its ranks gather each weight together,
        and those of two transfers must not meet. verl's NCCL engine ends a group with ``rebuild_group=True`` only,
        which the start-up check asks for.
        """
        sending, self._sending = self._sending, []
        if sending:
            await self._within_limit("ending a transfer that failed", [_settle(task) for task in sending], [])
        workers = [worker for replica in self.replicas for worker in replica.workers]
        generators = [worker.execute_checkpoint_engine.remote("finalize") for worker in workers]
        trainers = self.actor_wg.execute_checkpoint_engine(["finalize"] * self.actor_wg.world_size)
        await self._within_limit("ending the process group of a dead generator", trainers, generators)
        self._rollout = None

    async def _is_alive(self, replica: Any) -> bool:
        if replica.replica_rank in self._hung:
            return False
        for strike in range(1, self._settings.max_strikes + 1):
            questions = [server.check_alive.remote() for server in replica.servers]
            questions += [worker.get_replica_rank.remote() for worker in replica.workers]
            try:
                await asyncio.wait_for(asyncio.gather(*map(as_coroutine, questions)), HEALTH_TIMEOUT_S)
                return True
            except (ray.exceptions.RayError, asyncio.TimeoutError) as error:
                cause = str(error).strip().splitlines()[-1:] or "no answer"
                if not is_unreachable(error) and not isinstance(error, asyncio.TimeoutError):
                    logger.warning("generator %s is lost: %s", replica.replica_rank, cause)
                    return False
                logger.warning("generator %s is out of reach (%d): %s", replica.replica_rank, strike, cause)
                if is_unreachable(error) and strike < self._settings.max_strikes:
                    await asyncio.sleep(strike_pause_s(strike))
        return False


async def _settle(task: asyncio.Future[Any]) -> None:
    """Wait for the end of a call, however it ends."""
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # taken note of: what raised it was raised by the transfer


def _summarise(updates: list[dict[str, float]], transfer_s: float) -> dict[str, float]:
    def total(key: str) -> float:
        return float(sum(update[key] for update in updates))

    prefix = "scalerl/pipeline"
    return {
        f"{prefix}/transfer_s": transfer_s,
        f"{prefix}/swap_s": max(update["swap_s"] for update in updates),
        f"{prefix}/pause_s": max(update["pause_s"] for update in updates),
        f"{prefix}/kept_requests": total("kept_requests"),
        f"{prefix}/recomputed_tokens": total("recomputed_tokens"),
        f"{prefix}/tokens_lost": total("tokens_lost"),
        f"{prefix}/generated_tokens": total("generated_tokens"),
        f"{prefix}/continued_tokens": total("continued_tokens"),
        f"{prefix}/continued_recomputed_tokens": total("continued_recomputed_tokens"),
        f"{prefix}/generator_idle_fraction": total("idle_s") / max(total("wall_s"), 1e-9),
        f"{prefix}/replicas": float(len(updates)),
    }
