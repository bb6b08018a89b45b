# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.faults.relays FOLDER``: weight updates from two trainer nodes to three generators; two of them end.

Two Ray nodes of one host: trainer ranks 0 and 1 on the one, rank 2 and the generators on the other. FOLDER holds
models; writes FOLDER/relays.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from scalerl_verl.cpu.vllm_alias import install_vllm_alias

install_vllm_alias()

import verl  # noqa: E402,F401 - loads the plugin
from verl.single_controller.ray.base import RayClassWithInitArgs, RayWorkerGroup  # noqa: E402

from scalerl_verl.pipeline import failures, weights  # noqa: E402
from scalerl_verl.pipeline.settings import PipelineSettings  # noqa: E402
from tests.faults.generator_actor import Replica  # noqa: E402
from tests.faults.relay_actors import Generator, TrainerRank, make_checkpoint_engine  # noqa: E402

MEMORY = 80 * 2**20
HEALTH_TIMEOUT_S = 15.0
SETTINGS = PipelineSettings(transfer_timeout_s=60.0, max_strikes=1)


def start_cluster() -> list[str]:
    """Ids of two nodes."""
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": MEMORY}
    for attempt in range(3):
        try:
            cluster = Cluster(initialize_head=True, head_node_args=head)
            break
        except Exception:  # Ray gives a node 30 s to start, too few beside other tests
            if attempt == 2:
                raise
    cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    ray.init(address=cluster.address, log_to_driver=False)
    first = ray.get_runtime_context().get_node_id()
    return [first, *(node["NodeID"] for node in ray.nodes() if node["NodeID"] != first)]


def on(node: str, cls: type) -> Any:
    return ray.remote(cls).options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))


class Topology:
    def __init__(self, folder: Path) -> None:
        nodes = start_cluster()
        ranks = [
            on(node, TrainerRank).remote(str(folder), rank, 3) for rank, node in enumerate([*2 * nodes[:1], nodes[1]])
        ]
        self.generators = [on(nodes[1], Generator).remote(str(folder), rank) for rank in range(3)]
        self.trainer = RayWorkerGroup(
            worker_handles=ranks, ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(TrainerRank))
        )
        self.num_lost = 0
        self.results: dict[str, Any] = {}
        self.folder = folder

    def use(self, backend: str) -> None:
        """A new updater over the generators that are left."""
        places = [
            *self.trainer.use(backend),
            *ray.get([generator.use.remote(backend) for generator in self.generators]),
        ]
        self.results[f"{backend}, nodes"] = [place == places[0] for place in places]
        replicas = [
            Replica(replica_rank=rank, servers=[actor], workers=[actor], server_address=f"generator-{rank}")
            for rank, actor in enumerate(self.generators)
        ]
        self.lost: list[Any] = []
        config = SimpleNamespace(backend=backend, custom_backend_module=None)
        self.updater = weights.WeightUpdater(config, self.trainer, replicas, SETTINGS, self.lost.extend)

    def update(self, version: int, name: str) -> None:
        """Train, update, and note what the generators that are left hold."""
        wanted = self.trainer.train()
        metrics = self.updater.update_weights(version)
        for replica in self.lost:
            self.generators = [actor for actor in self.generators if actor is not replica.servers[0]]
        seen = ray.get([generator.look.remote() for generator in self.generators])
        senders = self.trainer.take_sizes()
        self.results[name] = {
            "wanted": list(wanted[0].items()), "held": [list(held.items()) for held, _, _ in seen],
            "lost": [replica.replica_rank for replica in self.lost], "replicas": metrics["scalerl/pipeline/replicas"],
            "ranks": [rank for rank, _ in senders] + [rank for _, rank, _ in seen],
            "buckets": [sizes for _, sizes in senders] + [sizes for _, _, sizes in seen],
        }  # fmt: skip
        (self.folder / "relays.json").write_text(json.dumps(self.results))


def main() -> None:
    weights.HEALTH_TIMEOUT_S, failures.FIRST_PAUSE_S = HEALTH_TIMEOUT_S, 0.1
    folder = Path(sys.argv[1])
    make_checkpoint_engine("nccl", folder, False)  # verl's registry learns of it
    topology = Topology(folder)
    topology.use("nccl")
    topology.update(1, "nccl, first")
    topology.update(2, "nccl, second")
    ray.get(topology.generators[1].plant.remote("dies"))
    topology.update(3, "nccl, one dies")
    topology.update(4, "nccl, without it")
    topology.use("gloo")
    topology.update(5, "gloo, first")
    ray.get(topology.generators[0].plant.remote("hangs"))
    topology.update(6, "gloo, one hangs")
    topology.update(7, "gloo, without it")


if __name__ == "__main__":
    main()
