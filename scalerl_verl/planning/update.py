# SPDX-License-Identifier: Apache-2.0
"""How long a weight update holds the trainer and stops the generators of a ``pipeline_rl`` run.

Bytes are counted. Times are a fixed part and bytes over a rate, a straight line through what `benchmarks/results`
records of two sizes on two H200 of one host; between hosts the rate is an assumption about the network. What each of
thousands of small experts costs beside its bytes has not been measured and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from scalerl_verl.names import HOST, NONE, PIPELINE_RL
from scalerl_verl.pipeline.transfer import sent_weights
from scalerl_verl.planning.layout import RunLayout
from scalerl_verl.shapes import ModelShape

GPUS_OF_A_HOST = 8
CALLS_S = 0.083
"""Seconds of an update that moves nothing: calls through Ray, the process group, the bookkeeping of each weight."""
NVLINK_BYTES_S = 80e9
"""Bytes a second that a generator takes from the trainer within a host, filling and emptying of buckets included."""
SWAP_S = 0.0117
"""Seconds for which an engine stands still whatever the size."""
LOAD_BYTES_S = 0.80e12
"""Bytes a second at which vLLM's worker loads what waits on its GPU."""
BUS_BYTES_S = 38e9
"""The same from page-locked host memory."""


@dataclass(frozen=True)
class Update:
    """One weight update.

    Args:
        sent_bytes: of all weights, in the dtype in which they are sent.
        trainers: GPUs over which weights are sharded.
        trainers_per_node: of these on one node.
        generators: GPUs that take the weights.
        ranks: GPUs of an engine.
        staging: where weights wait for the swap.
        network_bytes_s: bytes a second of the network card of one GPU, one way.
    """

    sent_bytes: float
    trainers: int
    trainers_per_node: int
    generators: int
    ranks: int
    staging: str
    network_bytes_s: float

    @property
    def within_host(self) -> bool:
        """Whether all GPUs are taken to be on one host: they are few enough."""
        return self.trainers + self.generators <= GPUS_OF_A_HOST

    @property
    def gather_bytes_s(self) -> float:
        """Bytes a second at which each trainer gathers the others' shards.

        A node takes what it lacks through the network cards of all its GPUs.
        """
        missing = 1 - self._on_one_node / self.trainers
        return min(NVLINK_BYTES_S, self._cards_bytes_s / missing) if missing else NVLINK_BYTES_S

    @property
    def send_bytes_s(self) -> float:
        """Bytes a second at which every generator receives.

        They leave the first trainer's node through the network cards of all trainers there, which verl's NCCL engine
        takes into its group as relays. In host memory they arrive at the speed of the bus.
        """
        rates = [NVLINK_BYTES_S, *([] if self.within_host else [self._cards_bytes_s])]
        return min(*rates, BUS_BYTES_S) if self.staging == HOST else min(rates)

    @property
    def _on_one_node(self) -> int:
        return min(self.trainers, self.trainers_per_node)

    @property
    def _cards_bytes_s(self) -> float:
        """Of the network cards of all trainers on a node together."""
        return self._on_one_node * self.network_bytes_s

    @property
    def blocked_s(self) -> float:
        """Seconds in which the trainer does not train.

        verl gathers the next bucket while it sends the last one, so that the slower of both counts. The swap follows.
        """
        return CALLS_S + self.sent_bytes / min(self.gather_bytes_s, self.send_bytes_s) + self.swap_s

    @property
    def swap_s(self) -> float:
        """Seconds in which weights that have arrived become those of the engine."""
        return SWAP_S + self.sent_bytes / self.ranks / (BUS_BYTES_S if self.staging == HOST else LOAD_BYTES_S)

    @property
    def pause_s(self) -> float:
        """Seconds for which the generators stand still."""
        return self.blocked_s if self.staging == NONE else self.swap_s


def find_update(shape: ModelShape, layout: RunLayout, network_bytes_s: float) -> Update | None:
    """The update of a run; None outside of ``pipeline_rl``."""
    if layout.mode != PIPELINE_RL:
        return None
    transfer = layout.generator.transfer
    return Update(
        sent_bytes=float(sum(sent_weights(shape)) * transfer.sent_bytes),
        trainers=layout.trainer.num_shards,
        trainers_per_node=layout.trainer_node_gpus,
        generators=layout.generator_gpus,
        ranks=layout.generator.tensor_parallel,
        staging=transfer.staging,
        network_bytes_s=network_bytes_s,
    )
