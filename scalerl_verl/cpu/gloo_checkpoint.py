# SPDX-License-Identifier: Apache-2.0
"""``checkpoint_engine.backend=gloo``: weights from trainer rank 0 to every rollout worker, without NCCL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Generator
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from scalerl_verl.names import GLOO


@CheckpointEngineRegistry.register(GLOO)
class GlooCheckpointEngine(CheckpointEngine):
    """Broadcasts buckets of weights over a private gloo group that lives for one update.

    Each bucket is three broadcasts from rank 0: the size of a JSON header, the header (names, shapes, dtypes,
    whether it is the last), and one flat uint8 buffer.

    Args:
        bucket_size: bytes of a bucket; a tensor that is larger travels in a bucket of its own.
        is_master: this process is trainer rank 0 and owns the rendezvous store.
        timeout_s: seconds after which a broadcast without its peers fails.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_s: float = 300.0) -> None:
        if bucket_size <= 0 or timeout_s <= 0:
            raise ValueError(f"bucket_size={bucket_size} and timeout_s={timeout_s} must be positive")
        self.bucket_size = bucket_size
        self.is_master = is_master
        self._timeout = timedelta(seconds=timeout_s)
        self._rank = -1
        self._store: dist.TCPStore | None = None
        self._group: dist.ProcessGroupGloo | None = None

    def prepare(self) -> tuple[str, int] | None:
        """Open the rendezvous store on the master; returns its (address, port), None elsewhere."""
        if not self.is_master:
            return None
        address = ray.util.get_node_ip_address().strip("[]")
        # Port 0 and kept open: a port that is chosen first and bound later can be taken in between.
        self._store = dist.TCPStore(address, 0, None, is_master=True, timeout=self._timeout, wait_for_workers=False)
        return address, self._store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Trainer rank 0 is rank 0 of the group, the rollout workers are 1..N; other trainer ranks stay out."""
        world_size = 1 + rollout_world_size
        outside = actor_wg_world_size - 1
        trainer = {
            "rank": [0] + [-1] * outside,
            "world_size": [world_size] * actor_wg_world_size,
            "master": [metadata[0]] * actor_wg_world_size,
        }
        rollout = {
            "rank": list(range(1, world_size)),
            "world_size": [world_size] * rollout_world_size,
            "master": [metadata[0]] * rollout_world_size,
        }
        return trainer, rollout

    def init_process_group(self, rank: int, world_size: int, master: tuple[str, int]) -> None:
        self._rank = rank
        if rank < 0:
            return
        if rank > 0:
            self._store = dist.TCPStore(master[0], master[1], None, is_master=False, timeout=self._timeout)
        self._group = dist.ProcessGroupGloo(self._store, rank, world_size, self._timeout)

    def finalize(self) -> None:
        self._group = None
        self._store = None

    def _broadcast(self, tensor: torch.Tensor) -> None:
        # A reference of its own: `finalize` may come while a dead peer is waited for, and must not destroy the group.
        group = self._group
        assert group is not None, "init_process_group has not run"
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        group.broadcast([tensor], options).wait()

    def _send_bucket(self, entries: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        flat = [tensor.reshape(-1).view(torch.uint8) for _, tensor in entries]
        body = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
        tensors = [(name, list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in entries]
        header = json.dumps({"tensors": tensors, "num_bytes": body.numel(), "is_last": is_last}).encode()
        self._broadcast(torch.tensor([len(header)], dtype=torch.int64))
        self._broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        if body.numel():
            self._broadcast(body)

    def _receive_bucket(self) -> tuple[dict[str, Any], torch.Tensor]:
        size = torch.empty(1, dtype=torch.int64)
        self._broadcast(size)
        header = torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(header)
        bucket = json.loads(header.numpy().tobytes())
        body = torch.empty(bucket["num_bytes"], dtype=torch.uint8)
        if body.numel():
            self._broadcast(body)
        return bucket, body

    @torch.no_grad()
    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> dict[str, float]:
        """Broadcast all weights; returns the bytes sent as a metric (empty on trainer ranks other than 0)."""
        if self._rank < 0:
            for _ in weights:  # gathering each tensor is collective over the trainer's ranks
                pass
            return {}
        entries: list[tuple[str, torch.Tensor]] = []
        size = total = 0
        for name, weight in weights:
            # A copy: the generator may reuse its buffer, and gloo needs host memory.
            tensor = weight.detach().to("cpu", copy=True).contiguous()
            if entries and size + tensor.nbytes > self.bucket_size:
                await asyncio.to_thread(self._send_bucket, entries, False)
                entries, size = [], 0
            entries.append((name, tensor))
            size += tensor.nbytes
            total += tensor.nbytes
        await asyncio.to_thread(self._send_bucket, entries, True)
        return {"scalerl/pipeline/synced_bytes_sum": float(total)}

    @torch.no_grad()
    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield (name, tensor) in the order they were sent."""
        is_last = False
        while not is_last:
            bucket, body = await asyncio.to_thread(self._receive_bucket)
            is_last, offset = bucket["is_last"], 0
            for name, shape, dtype_name in bucket["tensors"]:
                dtype = getattr(torch, dtype_name)
                num_bytes = torch.Size(shape).numel() * dtype.itemsize
                # A slice at an arbitrary byte offset cannot be viewed as a wider dtype: copy it first.
                yield name, body[offset : offset + num_bytes].clone().view(dtype).view(shape)
                offset += num_bytes
