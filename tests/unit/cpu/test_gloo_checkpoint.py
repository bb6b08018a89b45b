# SPDX-License-Identifier: Apache-2.0
"""Weights from one trainer to two receivers over real gloo groups between processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import verl  # noqa: F401 - loads the plugin before its checkpoint engine is imported

from scalerl_verl.cpu.gloo_checkpoint import GlooCheckpointEngine

NUM_RECEIVERS = 2
BUCKET_BYTES = 64
DEADLINE_S = 120


def make_weights(case: str) -> list[tuple[str, torch.Tensor]]:
    """The weights of a case, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(7, 3, generator=generator)
    return {
        "dtypes": [
            ("float32", random[:2]),
            ("bfloat16", random[:3, :1].bfloat16()),
            ("int64", torch.arange(-2, 3)),
            ("bool", torch.tensor([True, False, True])),
            ("not_contiguous", random.t()),
        ],
        "shapes": [
            ("scalar", torch.tensor(3.5)),
            ("empty", torch.empty(0, 4)),
            ("empty_int", torch.empty(0, dtype=torch.int64)),
            ("scalar_bfloat16", torch.tensor(-1.5, dtype=torch.bfloat16)),
            ("after_odd_offset", torch.tensor([1.0, 2.0])),
        ],
        "larger_than_a_bucket": [("small", torch.ones(1)), ("large", random), ("last", torch.zeros(2))],
        "many_buckets": [(f"layer.{i}.weight", torch.full((3, 4), float(i))) for i in range(40)],
        "exactly_full_buckets": [(f"w{i}", torch.full((16,), float(i))) for i in range(3)],
        "nothing": [],
    }[case]


CASES = ("dtypes", "shapes", "larger_than_a_bucket", "many_buckets", "exactly_full_buckets", "nothing")


def reused_buffers(weights: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights as verl's generators may: the memory of one is overwritten before the next."""
    for name, weight in weights:
        buffer = weight.clone()
        yield name, buffer
        buffer.fill_(1)


def run_process(rank: int, masters: Any, results: Any) -> None:
    """One process of the group: a new group for every case, as verl makes one for every update."""
    import ray

    ray.util.get_node_ip_address = lambda: "127.0.0.1"
    engine = GlooCheckpointEngine(BUCKET_BYTES, is_master=rank == 0, timeout_s=60)
    for case in CASES:
        master = engine.prepare()
        if rank == 0:
            for _ in range(NUM_RECEIVERS):
                masters.put(master)
        else:
            assert master is None
            master = masters.get(timeout=DEADLINE_S)
        engine.init_process_group(rank, 1 + NUM_RECEIVERS, master)
        if rank == 0:
            answer = asyncio.run(engine.send_weights(reused_buffers(make_weights(case))))
        else:
            # Nested lists instead of tensors: a queue would share a tensor's memory with a process that ends.
            answer = asyncio.run(collect(engine))
        results.put((case, rank, answer))
        # Nobody opens the next store before all have left this one.
        masters.join() if rank == 0 else masters.task_done()
        engine.finalize()


async def collect(engine: GlooCheckpointEngine) -> list[tuple[str, str, list[int], Any]]:
    return [
        (name, str(tensor.dtype), list(tensor.shape), tensor.tolist())
        async for name, tensor in engine.receive_weights(global_steps=1)
    ]


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, int], Any]:
    """(case, rank) -> what the process got; rank 0 sends.

    A server that imports once forks the processes: three imports of verl would take longer than everything else.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    masters, results = context.JoinableQueue(), context.Queue()
    processes = [
        context.Process(target=run_process, args=(rank, masters, results), daemon=True)
        for rank in range(1 + NUM_RECEIVERS)
    ]
    for process in processes:
        process.start()
    found = {}
    try:
        for _ in range(len(CASES) * len(processes)):
            case, rank, answer = results.get(timeout=DEADLINE_S)
            found[case, rank] = answer
    except queue.Empty:
        pytest.fail(f"no answer within {DEADLINE_S} s after {sorted(found)}")
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
            process.join()
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rank", range(1, 1 + NUM_RECEIVERS))
def test_receiver_gets_the_same_weights_in_the_same_order(answers: dict, case: str, rank: int) -> None:
    sent = [(name, str(w.dtype), list(w.shape), w.tolist()) for name, w in make_weights(case)]
    assert answers[case, rank] == sent


@pytest.mark.parametrize("case", CASES)
def test_sender_reports_the_bytes_it_sent(answers: dict, case: str) -> None:
    num_bytes = sum(weight.nbytes for _, weight in make_weights(case))
    assert answers[case, 0] == {"scalerl/pipeline/synced_bytes_sum": float(num_bytes)}


def test_cases_cross_the_bucket_size_as_they_are_named() -> None:
    sizes = {case: [weight.nbytes for _, weight in make_weights(case)] for case in CASES}
    assert max(sizes["larger_than_a_bucket"]) > BUCKET_BYTES
    assert sum(sizes["many_buckets"]) > 10 * BUCKET_BYTES
    assert set(sizes["exactly_full_buckets"]) == {BUCKET_BYTES}


def test_trainer_ranks_other_than_the_first_stay_out_of_the_group() -> None:
    trainer, rollout = GlooCheckpointEngine.build_topology(3, 2, [("10.0.0.1", 4711), None, None])
    assert trainer == {"rank": [0, -1, -1], "world_size": [3, 3, 3], "master": [("10.0.0.1", 4711)] * 3}
    assert rollout == {"rank": [1, 2], "world_size": [3, 3], "master": [("10.0.0.1", 4711)] * 2}


def test_trainer_rank_outside_the_group_still_runs_its_generator() -> None:
    """Gathering a sharded tensor is collective: a rank that does not iterate would stop the one that sends."""
    engine = GlooCheckpointEngine(BUCKET_BYTES)
    assert engine.prepare() is None
    engine.init_process_group(-1, 3, ("127.0.0.1", 1))
    seen = []

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in make_weights("dtypes"):
            seen.append(name)
            yield name, weight

    assert asyncio.run(engine.send_weights(gather())) == {}
    assert seen == [name for name, _ in make_weights("dtypes")]


@pytest.mark.parametrize(("bucket_size", "timeout_s"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -5.0)])
def test_sizes_and_times_that_are_not_positive_are_refused(bucket_size: int, timeout_s: float) -> None:
    with pytest.raises(ValueError, match=rf"bucket_size={bucket_size} and timeout_s={timeout_s} must be positive"):
        GlooCheckpointEngine(bucket_size, timeout_s=timeout_s)


def test_group_without_its_peer_fails_after_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    engine = GlooCheckpointEngine(BUCKET_BYTES, is_master=True, timeout_s=0.5)
    master = engine.prepare()
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        engine.init_process_group(0, 2, master)
    assert time.monotonic() - began < 10


def test_engine_is_found_by_its_name_in_verl_s_registry() -> None:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    assert CheckpointEngineRegistry.get("gloo") is GlooCheckpointEngine
