# SPDX-License-Identifier: Apache-2.0
"""What a pipeline run's driver takes of a core at the paper's scale: real Ray and TransferQueue, stubs for engines.

python -m benchmarks.pipeline.driver [--engines 64] [--record]

48 groups of 16 responses a batch and k = 8: 6,912 requests lie in the engines, sent by our client through our balancer,
while the driver looks at its queue and hands out updates. It is CPU time of processes, not wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import ray
import transfer_queue as tq
from omegaconf import OmegaConf

from benchmarks.rows import append_rows, run_facts
from scalerl_verl.cpu.vllm_alias import install_vllm_alias

install_vllm_alias()

from scalerl_verl.pipeline.admission import AdmissionRule  # noqa: E402
from scalerl_verl.pipeline.balancer import PipelineBalancer  # noqa: E402
from scalerl_verl.pipeline.buffer import PipelineReplayBuffer  # noqa: E402
from scalerl_verl.pipeline.client import PipelineClient  # noqa: E402
from scalerl_verl.pipeline.groups import GroupWatch  # noqa: E402
from scalerl_verl.pipeline.lead import Lead  # noqa: E402
from scalerl_verl.pipeline.settings import PipelineSettings  # noqa: E402
from scalerl_verl.pipeline.weights import WeightUpdater  # noqa: E402

BENCH = "driver"
BATCH, GROUP, K = 48, 16, 8
STEP_S = 74.1
"""Of the paper's 8B run on 16 + 64 GPUs, as `scalerl plan` estimates it."""
POLL_S = 2.0
"""verl's default interval between two looks."""
LOOKS, UPDATES = 10, 3


class Engine:
    """A generator and its worker in one actor: keeps its requests, and answers what the driver asks."""

    def __init__(self) -> None:
        self.door, self.num_open = asyncio.Event(), 0

    async def generate(self, **_: Any) -> Any:
        self.num_open += 1
        await self.door.wait()
        extra = {"versions": [[0, 1]], "prefix_version": 0}
        # verl's TokenOutput to who asked; its import would cost each of 64 processes half a GiB
        return SimpleNamespace(token_ids=[1], stop_reason="completed", extra_fields=extra)

    async def is_queued(self, *_: Any) -> bool:
        return False

    async def get_num_open(self) -> int:
        return self.num_open

    async def open_door(self) -> None:
        self.door.set()

    async def check_alive(self) -> None:
        pass

    async def get_replica_rank(self) -> int:
        return 0

    async def stage_weights(self, *_: Any, **__: Any) -> tuple[str, bytes]:
        return "layout", b""

    async def swap(self, *_: Any) -> dict[str, float]:
        names = "pause_s swap_s kept_requests recomputed_tokens tokens_lost idle_s wall_s generated_tokens"
        return dict.fromkeys([*names.split(), "continued_tokens", "continued_recomputed_tokens"], 1.0)


class Clients:
    """The agent loops' side, in a process of its own as in a run."""

    def __init__(self, balancer: Any) -> None:
        self.client = PipelineClient(OmegaConf.create({"trainer": {"v1": {"pipeline_rl": {}}}}), balancer)

    async def send(self, num: int) -> int:
        prompt = list(range(500))
        calls = [self.client.generate(f"r{i}", prompt_ids=prompt, sampling_params={}) for i in range(num)]
        return len(await asyncio.gather(*calls))


class Replica(SimpleNamespace):
    __hash__ = object.__hash__  # verl puts replicas into a set


class Group:
    """verl's worker group, of the generators' workers or (without any) of a trainer."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    def stage_weights(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [worker.stage_weights.remote(*args, **kwargs) for worker in self.workers]

    def update_weights(self, **_: Any) -> list[Any]:
        return []


class Balancer(PipelineBalancer):
    def get_pid(self) -> int:
        return os.getpid()


class LookedEnoughError(Exception):
    """The buffer has looked as often as it was to."""


class Buffer(PipelineReplayBuffer):
    """Looks `LOOKS` times without a pause between."""

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        self.num_looks = getattr(self, "num_looks", 0) + 1
        if self.num_looks == LOOKS:
            raise LookedEnoughError
        return last_debug_time


def cpu_s(call: Callable[[], Any]) -> float:
    """CPU seconds of this process, all of its threads."""
    began = time.process_time()
    call()
    return time.process_time() - began


def fill_queue(num_finished: int) -> None:
    """All groups that the bound allows, the first of them still running, so that no batch can train at step K + 1."""
    keys, tags = [], []
    for number in range(BATCH * (K + 1)):
        uid = f"{number:08x}-0000-0000-0000-000000000000"
        is_finished = 0 < number <= num_finished
        keys.append(uid)
        status = "finished" if is_finished else "running"
        tags.append({"is_prompt": True, "status": status, "global_steps": 1 + number // BATCH})
        for session in range(GROUP if is_finished else 0):
            keys.append(f"{uid}_{session}_0")
            tags.append({"status": "success", "prompt_len": 500, "response_len": 9000, "seq_len": 9500,
                         "global_steps": 1, "min_global_steps": 0, "max_global_steps": 0})  # fmt: skip
    tq.kv_batch_put(keys=keys, partition_id="train", tags=tags)


def look_s(num_finished: int) -> float:
    """CPU seconds of one look at a queue with so many finished groups."""
    fill_queue(num_finished)
    rule = AdmissionRule(BATCH, K)
    buffer = Buffer(
        rule, group_size=GROUP, watch=GroupWatch(3, 1e6), admit=lambda num: None, reissue=lambda uids: uids,
        check_generators=lambda: None, num_steps=lambda: 1000, lead=Lead(rule), trainer_mode="pipeline_rl",
        trainer_config={}, max_off_policy_threshold=None, max_off_policy_strategy="wait", sampler_kwargs={},
    )  # fmt: skip
    buffer._is_first_look = False  # of a resumed run, which would start all of it again

    def look() -> None:
        try:
            buffer.sample(K + 1, "train", BATCH)
        except LookedEnoughError:
            return
        raise AssertionError("a batch was complete")

    spent = cpu_s(look) / LOOKS
    tq.kv_clear(keys=list(buffer.partitions["train"]) + list(buffer.prompt_global_steps["train"]), partition_id="train")
    return spent


def measure(num_engines: int) -> Iterator[tuple[str, float]]:
    """(What, CPU seconds)."""
    engines = [ray.remote(Engine).options(num_cpus=0, max_concurrency=100_000).remote() for _ in range(num_engines)]
    ray.get([engine.check_alive.remote() for engine in engines])
    servers = {f"engine-{number}": engine for number, engine in enumerate(engines)}
    balancer = ray.remote(Balancer).options(num_cpus=0).remote(servers=servers)
    process = psutil.Process(ray.get(balancer.get_pid.remote()))
    before = sum(process.cpu_times()[:2])
    clients = ray.remote(Clients).options(num_cpus=0).remote(balancer)
    num_requests = BATCH * (K + 1) * GROUP
    answers = clients.send.remote(num_requests)
    while (num_open := sum(ray.get([engine.get_num_open.remote() for engine in engines]))) < num_requests:
        if ray.wait([answers], timeout=5.0)[0]:
            ray.get(answers)  # raises what the clients raised
        print(f"{num_open} of {num_requests} requests under way", flush=True)
    replicas = [
        Replica(replica_rank=number, servers=[engine], workers=[engine], server_address=name)
        for number, (name, engine) in enumerate(servers.items())
    ]
    config = SimpleNamespace(backend="gloo", custom_backend_module=None)
    updater = WeightUpdater(
        config, Group([]), replicas, PipelineSettings(), lambda lost: None,  # type: ignore[arg-type]
        serving=lambda: ray.get(balancer.get_all_servers.remote()),
    )  # fmt: skip
    updater._rollout = Group(engines)
    updater.update_weights(1)
    spent = cpu_s(lambda: [updater.update_weights(2 + number) for number in range(UPDATES)])
    yield "an update", spent / UPDATES
    yield "a look, generation is the limit", look_s(BATCH - 1)
    yield "a look, training is the limit", look_s(BATCH * (K + 1) - 1)
    ray.get([engine.open_door.remote() for engine in engines])
    assert ray.get(answers) == num_requests
    yield "balancer, a request", (sum(process.cpu_times()[:2]) - before) / num_requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--record", action="store_true", help="append rows to benchmarks/results")
    options = parser.parse_args()
    ray.init(num_cpus=16, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False)
    tq.init()
    facts = run_facts(f"driver-{int(time.time())}")
    rows = []
    for what, seconds in measure(options.engines):
        case = {"what": what, "engines": options.engines, "batch": BATCH, "group": GROUP, "k": K}
        rows.append({"case": case, "impl": "pipeline_rl", "metric": "cpu", "p50": seconds, "unit": "s", **facts})
        print(f"{what}: {seconds * 1e3:.2f} ms of CPU", flush=True)
    found = {row["case"]["what"]: row["p50"] for row in rows}
    for limit in ("generation", "training"):
        share = (found["an update"] + STEP_S / POLL_S * found[f"a look, {limit} is the limit"]) / STEP_S
        print(f"driver, {limit} is the limit: {share:.1%} of a core at a step of {STEP_S} s")
    if options.record:
        append_rows(BENCH, rows)
    ray.shutdown()


if __name__ == "__main__":
    main()
