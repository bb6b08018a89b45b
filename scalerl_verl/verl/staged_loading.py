# SPDX-License-Identifier: Apache-2.0
"""verl's loading of weights in vLLM's worker, from memory that was filled before the engine paused.

verl hands weights over a socket, bucket by bucket, while nothing is generated. Everything else it does around a load
(weight loaders of experts, what follows a load) stays as it is.
"""

from __future__ import annotations

import functools
import importlib
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from scalerl_verl.upstream.spec import VERL_VERSIONS, PatchSpec

if TYPE_CHECKING:
    import torch

_TRANSFER = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"


class StagedReceiver:
    """In the place of verl's receiver: all weights at once, from the shared memory."""

    def __init__(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self._weights = weights

    def receive_weights(self, on_bucket_received: Callable[[list[tuple[str, torch.Tensor]], bool], None]) -> None:
        """Call verl's ``on_bucket_received(weights, is_last)`` once; the memory may be filled anew afterwards."""
        import torch  # every process that loads the plugin reads this module; only vLLM's worker gets here

        on_bucket_received(self._weights, True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _build(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def update_weights_from_ipc(self: Any, *args: Any, staged: list[bytes] | None = None, **kwargs: Any) -> Any:
        """As before without ``staged``; with it, load from there.

        Args:
            self: verl's extension of vLLM's worker.
            staged: for each rank of the engine a pickled `Layout`, or b"" for the one before.
            *args: of the original, without ``staged``.
            **kwargs: likewise.
        """
        if staged is None:
            return original(self, *args, **kwargs)
        if layout := staged[self.rank]:
            self._scalerl_staged = pickle.loads(layout).open(self.device)
        transfer: Any = importlib.import_module(_TRANSFER)
        receiver = transfer.BucketedWeightReceiver
        transfer.BucketedWeightReceiver = lambda **_: StagedReceiver(self._scalerl_staged)
        try:
            return original(self)
        finally:
            transfer.BucketedWeightReceiver = receiver

    return update_weights_from_ipc


SPECS = (
    PatchSpec(
        name="verl.weight_sync.staged",
        module="verl.workers.rollout.vllm_rollout.utils",
        target="vLLMColocateWorkerExtension.update_weights_from_ipc",
        build=_build,
        kind="wrap",
        why="A pipeline run has the weights in the generator's memory before it pauses; verl's worker can load only "
        "what comes over its socket during the pause.",
        distribution="verl",
        versions=VERL_VERSIONS,
        sources=("5d2e492bbd1110bbab3487c37b1c329e89ac4970712a2926688ce0f22fcf6149",),
        when="named",
        removal="verl's worker loads from memory that was filled before",
        late_ok=True,
    ),
)
