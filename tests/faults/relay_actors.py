# SPDX-License-Identifier: Apache-2.0
"""Trainer ranks and generators as Ray actors around verl's NCCL checkpoint engine, whose NCCL is a stand-in on gloo.

Real: verl's engine (who joins the group, who relays, which bucket goes when), verl's FSDP2 engine, our workers on both
sides. Stand-ins: NCCL, cupy, CUDA, and the server that swaps.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import sys
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ray
import torch
import torch.distributed as dist
import verl  # noqa: F401 - loads the plugin
from omegaconf import OmegaConf
from torch.distributed.tensor import DTensor
from verl.single_controller.base.decorator import Dispatch, register

from scalerl_verl.cpu.gloo_checkpoint import GlooCheckpointEngine
from scalerl_verl.pipeline.sending import SendingWorker
from scalerl_verl.pipeline.weights import StagingWorker
from tests.unit.head.head_engines import Case, make_engine

BUCKET_BYTES = 8192
GROUP_TIMEOUT_S = 15.0
"""Of the groups over gloo: ranks that do not reach a dead peer themselves wait so long for those that do."""
UPDATE = {
    "pause_s": 0.0, "swap_s": 0.0, "kept_requests": 0, "recomputed_tokens": 0, "tokens_lost": 0, "idle_s": 0.0,
    "wall_s": 1.0, "generated_tokens": 0, "continued_tokens": 0, "continued_recomputed_tokens": 0,
}  # fmt: skip


class StandInNccl:
    """``ray.util.collective`` over gloo; notes the bytes of each broadcast."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.num_built, self.sizes = folder, 0, list[int]()
        self.group: dist.ProcessGroupGloo | None = None

    def is_group_initialized(self, name: str) -> bool:
        return self.group is not None

    def init_collective_group(self, world_size: int, rank: int, backend: str, name: str) -> None:
        self.num_built += 1
        store = dist.FileStore(str(self.folder / f"nccl-{self.num_built}"), world_size)
        self.group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=GROUP_TIMEOUT_S))

    def destroy_collective_group(self, name: str) -> None:
        self.group = None

    def barrier(self, name: str) -> None:
        assert self.group is not None
        self.group.barrier().wait()
        time.sleep(0.5)  # ZMQ's subscriptions arrive by themselves, on GPUs while buffers are made

    def broadcast(self, bucket: torch.Tensor, src_rank: int, group_name: str) -> None:
        group = self.group
        assert group is not None
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src_rank, 0
        group.broadcast([bucket], options).wait()
        self.sizes.append(bucket.numel())


class StandInTorch:
    """torch in verl's module, with a CPU in the place of CUDA."""

    cuda = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *args: Any, device: str = "", **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)


def make_checkpoint_engine(backend: str, folder: Path, is_master: bool) -> Any:
    """verl's NCCL engine over the stand-ins, or our gloo engine."""
    if backend == "gloo":
        return GlooCheckpointEngine(BUCKET_BYTES, is_master=is_master, timeout_s=GROUP_TIMEOUT_S)
    cupy: Any = ModuleType("cupy")
    cupy.zeros, cupy.uint8, cupy.asarray, cupy.ndarray = torch.zeros, torch.uint8, lambda chunk: chunk, torch.Tensor
    sys.modules["cupy"] = cupy
    from verl.checkpoint_engine import nccl_checkpoint_engine

    nccl_checkpoint_engine.torch = StandInTorch()
    nccl_checkpoint_engine.collective = StandInNccl(folder)
    engine = nccl_checkpoint_engine.NCCLCheckpointEngine(BUCKET_BYTES, is_master=is_master, rebuild_group=True)
    engine.rank = -1
    return engine


def digest(weight: torch.Tensor) -> str:
    return hashlib.sha256(weight.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


class TrainerRank(SendingWorker):
    """verl's worker without its constructor: a rank of verl's FSDP2 engine that sends, relays, or stays out."""

    def __init__(self, folder: str, rank: int, world: int) -> None:
        torch.set_num_threads(1)
        self.folder, self.place = Path(folder), rank
        dist.init_process_group("cpu:gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
        self.config = OmegaConf.create({"rollout": {"dtype": "bfloat16"}})
        self.actor = SimpleNamespace(engine=make_engine(self.folder, Case(world=world)))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def use(self, backend: str) -> str:
        """Take another checkpoint engine; the Ray node of this rank."""
        self.checkpoint_engine = make_checkpoint_engine(backend, self.folder, self.place == 0)
        return str(ray.get_runtime_context().get_node_id())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self) -> dict[str, str]:
        """Change every weight; what generators should hold then, in the order in which it is sent."""
        with torch.no_grad():
            for parameter in self.actor.engine.module.parameters():
                parameter.mul_(1.5)
        state = self.actor.engine.module.state_dict()
        full = {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in state.items()}
        return {name: digest(weight.bfloat16()) for name, weight in full.items()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_sizes(self) -> tuple[int, list[int]]:
        """Rank in the group, and bytes of the buckets of which it took part in the broadcast since the last call."""
        return take_sizes(self.checkpoint_engine)


class Generator(StagingWorker):
    """verl's rollout worker without its constructor, and in place of the server that swaps."""

    def __init__(self, folder: str, rank: int) -> None:
        torch.set_num_threads(1)
        self.folder = Path(folder)
        self.server_adapter = SimpleNamespace(rollout_rank=0, replica_rank=rank)
        self.held: dict[str, str] = {}
        self.fault = ""

    async def use(self, backend: str) -> str:
        if hasattr(self, "checkpoint_engine"):
            self.execute_checkpoint_engine("finalize")
        self.checkpoint_engine = make_checkpoint_engine(backend, self.folder, False)
        self._receive, self.checkpoint_engine.receive_weights = self.checkpoint_engine.receive_weights, self._received
        return str(ray.get_runtime_context().get_node_id())

    async def plant(self, fault: str) -> None:
        """The next transfer is the last thing that it takes part in: "dies" or "hangs"."""
        self.fault = fault

    async def _received(self, **kwargs: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
        num = 0
        async for name, weight in self._receive(**kwargs):
            if self.fault and (num := num + 1) > 5:
                os.kill(os.getpid(), signal.SIGKILL if self.fault == "dies" else signal.SIGSTOP)
            yield name, weight

    async def swap(self, version: int, staged: list[bytes], recompute: bool) -> dict[str, float]:
        if staged[0]:
            self.weights = pickle.loads(staged[0]).open(torch.device("cpu"))
        self.held = {name: digest(weight) for name, weight in self.weights}
        return dict(UPDATE)

    async def look(self) -> tuple[dict[str, str], int, list[int]]:
        """Digests of the weights in the order of their arrival; rank in the group, bytes of its buckets."""
        return (self.held, *take_sizes(self.checkpoint_engine))

    async def check_alive(self) -> None:
        pass

    async def give_up(self) -> None:
        pass

    async def rejoin(self) -> None:
        pass


def take_sizes(engine: Any) -> tuple[int, list[int]]:
    module = sys.modules.get("verl.checkpoint_engine.nccl_checkpoint_engine")
    if module is None or isinstance(engine, GlooCheckpointEngine):
        return engine._rank, []
    sizes, module.collective.sizes = module.collective.sizes, []
    return engine.rank, sizes
