# SPDX-License-Identifier: Apache-2.0
"""Memory that two processes of one generator share: one collects new weights in it, vLLM's worker loads from it.

It is allocated, and opened by the other side, once: from then on an update only fills it, while vLLM generates, and
nothing of it has to be handed over while vLLM is paused.
"""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from scalerl_verl.pipeline.pieces import Pieces


@dataclass(frozen=True)
class Place:
    """Where a weight lies: byte ``offset`` of piece ``segment``."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    segment: int
    offset: int

    @property
    def end(self) -> int:
        """Where it ends in its piece, bytes."""
        return self.offset + self.shape.numel() * self.dtype.itemsize

    def view(self, segments: Sequence[torch.Tensor]) -> torch.Tensor:
        """The weight, in the memory of ``segments``."""
        return segments[self.segment][self.offset : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Layout:
    """What the other process needs: a way to open each piece, and what lies where."""

    openers: tuple[Callable[[torch.device], torch.Tensor], ...]
    places: tuple[Place, ...]

    def open(self, device: torch.device) -> list[tuple[str, torch.Tensor]]:
        """All weights by name, in the memory in which the other process puts them, seen from ``device``."""
        segments = [opener(device) for opener in self.openers]
        return [(place.name, place.view(segments)) for place in self.places]


class StagingBuffer:
    """Collects one set of weights after the other, each weight always at the same place.

    Args:
        on_device: keep weights on the device on which they arrive, if it is a GPU, instead of in host memory.
    """

    def __init__(self, on_device: bool) -> None:
        self._on_device = on_device
        self._pieces = Pieces()
        self._segments: list[torch.Tensor] = []
        self._openers: list[Callable[[torch.device], torch.Tensor]] = []
        self._places: list[Place] = []
        self._next = 0
        self._layout = b""
        self.layout_id = ""
        """Changes when something lies elsewhere than before."""

    def begin(self) -> None:
        """The next weight is the first of a new version."""
        self._next = 0

    def put(self, name: str, weight: torch.Tensor) -> None:
        """Copy ``weight`` (of any shape and dtype) to its place.

        Raises:
            torch.cuda.OutOfMemoryError: there is no room for another piece.
        """
        known = self._places[self._next] if self._next < len(self._places) else None
        if known is None or (known.name, known.dtype, known.shape) != (name, weight.dtype, weight.shape):
            self._forget_from(self._next)
            known = self._allocate(name, weight)
            self._places.append(known)
        known.view(self._segments).copy_(weight)
        self._next += 1

    def finish(self) -> bytes:
        """End a version: everything has arrived when this returns. The pickled `Layout`."""
        self._forget_from(self._next)
        if any(segment.is_cuda for segment in self._segments):
            torch.cuda.synchronize()
        if not self.layout_id:
            self.layout_id = uuid.uuid4().hex
            self._layout = pickle.dumps(Layout(tuple(self._openers), tuple(self._places)))
        return self._layout

    @property
    def num_bytes(self) -> int:
        """Bytes of all memory that was allocated."""
        return sum(segment.numel() for segment in self._segments)

    def _forget_from(self, index: int) -> None:
        if index == len(self._places):
            return
        del self._places[index:]
        self._pieces.keep((place.segment, place.end) for place in self._places)
        self.layout_id = ""

    def _allocate(self, name: str, weight: torch.Tensor) -> Place:
        self.layout_id = ""
        segment, offset = self._pieces.place(weight.nbytes)
        while len(self._segments) <= segment:
            memory, opener = self._new_segment(self._pieces.sizes[len(self._segments)], weight.device)
            self._segments.append(memory)
            self._openers.append(opener)
        return Place(name, weight.dtype, weight.shape, segment, offset)

    def _new_segment(self, num_bytes: int, device: torch.device) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
        if self._on_device and device.type == "cuda":
            from torch.multiprocessing.reductions import reduce_tensor

            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            return memory, partial(_open_device_memory, reduce_tensor(memory))
        # A file without a name: its pages live as long as somebody has them open, also after a SIGKILL, and /dev/shm,
        # which containers keep small, is not used.
        file = os.memfd_create("scalerl-weights")
        os.ftruncate(file, num_bytes)
        path = f"/proc/{os.getpid()}/fd/{file}"
        return _open_host_memory(path, num_bytes, device), partial(_open_host_memory, path, num_bytes)


def _open_host_memory(path: str, num_bytes: int, device: torch.device) -> torch.Tensor:
    memory = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    if device.type == "cuda":
        # Page-locked, by each process for itself: copies from and to the GPU run at the speed of the bus.
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    return memory


def _open_device_memory(handle: Any, device: torch.device) -> torch.Tensor:
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import rebuild_ipc

    return rebuild_ipc(handle, device.index)
