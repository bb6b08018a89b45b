# SPDX-License-Identifier: Apache-2.0
"""Control calls to a generator that holds as many requests as admission may send to it, and more.

Ray, our server class, verl's ``generate``, its limits and our weight updater are real; the engine is a stub.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from scalerl_verl.names import GLOO
from scalerl_verl.pipeline import weights
from scalerl_verl.pipeline.settings import PipelineSettings
from tests.faults.generator_actor import Replica, start_generators

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

NUM_REQUESTS = 7000
"""The paper's set-up admits 48 prompts x 9 batches x 16 responses = 6,912, all to one generator if the others die."""


@pytest.fixture(scope="module")
def generator() -> Iterator[Replica]:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
    try:
        yield start_generators(1)[0]
    finally:
        ray.shutdown()


@pytest.fixture(scope="module")
def requests(generator: Replica) -> list[Any]:
    """All are in the engine."""
    (server,) = generator.servers
    prompt = list(range(8))
    refs = [
        server.generate.remote(prompt_ids=prompt, sampling_params={}, request_id=f"r{number}")
        for number in range(NUM_REQUESTS)
    ]
    deadline = time.monotonic() + 240
    while (held := ray.get(server.num_running.remote(), timeout=weights.HEALTH_TIMEOUT_S)) < NUM_REQUESTS:
        assert time.monotonic() < deadline, f"{held} of {NUM_REQUESTS} requests entered the engine"
        time.sleep(0.5)
    return refs


def test_control_calls_do_not_wait_behind_requests(generator: Replica, requests: list[Any]) -> None:
    """Fault: every healthy generator counts as dead once it holds more requests than its actor lets in."""
    lost: list[Any] = []
    config: Any = SimpleNamespace(backend=GLOO, custom_backend_module=None)
    trainer: Any = None  # asked nothing
    updater = weights.WeightUpdater(config, trainer, [generator], PipelineSettings(), lost.extend)
    updater.check_generators()
    assert not lost and updater.replicas == [generator]


def test_weights_are_swapped_and_requests_aborted_beside_them(generator: Replica, requests: list[Any]) -> None:
    (server,) = generator.servers
    update = ray.get(server.swap.remote(1, [b""], False), timeout=weights.HEALTH_TIMEOUT_S)
    assert update["kept_requests"] == NUM_REQUESTS
    aborted = ray.get(server.abort_request.remote("r0"), timeout=weights.HEALTH_TIMEOUT_S)
    assert aborted["aborted"] is True
    assert ray.get(requests[0]).stop_reason == "aborted"
    ray.get(server.open_door.remote())
    rest = ray.get(requests[1:])
    assert {output.stop_reason for output in rest} == {"completed"}
    assert {tuple(map(tuple, output.extra_fields["versions"])) for output in rest} == {((1, 1),)}
