# SPDX-License-Identifier: Apache-2.0
"""verl's worker of separate_async keeps weights in host memory; on a CPU these copies have to be copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.experimental.separation.engine_workers import DetachActorWorker


class CopyingWorker(DetachActorWorker):
    """verl's; its ``.cpu()`` hands out memory of a parameter that lives on the CPU, which follows training."""

    @property
    def copy_handler(self) -> Callable[[Any], Any]:
        """verl's function that saves a model's shards (FSDP2: name -> shard and layout), with shards of their own."""
        save = super().copy_handler

        def copy(model: Any) -> Any:
            shards, layout = save(model)
            return {name: (shard.clone(), place) for name, (shard, place) in shards.items()}, layout

        return copy
