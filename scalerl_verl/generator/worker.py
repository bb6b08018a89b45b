# SPDX-License-Identifier: Apache-2.0
"""verl's extension of vLLM's worker, with what our server asks of it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from scalerl_verl.upstream import status

Weights = list[tuple[str, torch.Tensor]]


class StagedReceiver:
    """In the place of verl's receiver: all weights at once, from the shared memory."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def receive_weights(self, on_bucket_received: Callable[[Weights, bool], None]) -> None:
        """Call verl's ``on_bucket_received(weights, is_last)`` once; the memory may be filled anew afterwards."""
        on_bucket_received(self._weights, True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class ScaleRLWorkerExtension(vLLMColocateWorkerExtension):
    """Worker of a generator: weights also from memory that was filled before the engine paused, and what it measured.

    verl hands weights over a socket, bucket by bucket, while nothing is generated. Everything else it does around a
    load (weight loaders of experts, what follows a load) stays as it is.
    """

    def update_weights_from_ipc(self, *args: Any, staged: list[bytes] | None = None, **kwargs: Any) -> Any:
        """verl's without ``staged``; with it, load from there.

        Args:
            staged: for each rank of the engine a pickled `Layout`, or b"" for the one before.
            *args: of verl's, without ``staged``.
            **kwargs: likewise.
        """
        if staged is None:
            return super().update_weights_from_ipc(*args, **kwargs)
        if layout := staged[self.rank]:
            self._scalerl_staged = pickle.loads(layout).open(self.device)
        module: Any = bucketed_weight_transfer
        receiver = module.BucketedWeightReceiver
        module.BucketedWeightReceiver = lambda **_: StagedReceiver(self._scalerl_staged)
        try:
            return super().update_weights_from_ipc()
        finally:
            module.BucketedWeightReceiver = receiver

    def scalerl_facts(self) -> dict[str, list[dict[str, Any]]]:
        """What this process measured: vLLM's workers are no Ray actors, their server has to ask."""
        return status.all_facts()
