# SPDX-License-Identifier: Apache-2.0
"""Weights from trainer ranks on two Ray nodes to three generators, through verl's relays and over our gloo engine.

Two generators end inside a transfer: one dies, one is stopped. NCCL is a stand-in over gloo (relay_actors.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import pytest

from tests.paths import REPO
from tests.unit.head.test_head_engines import save_models

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("relays")
    save_models(folder)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SCALERL_", "VERL_", "RAY_"))}
    environment |= {"VERL_PLATFORM": "cpu", "SCALERL_VERL_ACTIVE": "1", "PYTHONPATH": str(REPO)}
    # Not where every Ray of this machine looks for one that runs. Ray's socket paths have to be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as apart:
        environment["RAY_TMPDIR"] = apart
        command = [sys.executable, "-m", "tests.faults.relays", str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads((folder / "relays.json").read_text())


UPDATES = {
    # ranks in the group of the three trainer ranks, then of the generators that are left; generators lost so far
    "nccl, first": ([0, 1, -1, 2, 3, 4], []),
    "nccl, second": ([0, 1, -1, 2, 3, 4], []),
    "nccl, one dies": ([0, 1, -1, 2, 3], [1]),
    "nccl, without it": ([0, 1, -1, 2, 3], [1]),
    "gloo, first": ([0, -1, -1, 1, 2], []),
    "gloo, one hangs": ([0, -1, -1, 1], [0]),
    "gloo, without it": ([0, -1, -1, 1], [0]),
}


@pytest.mark.fault("a peer that dies inside a transfer leaves the other ranks of the trainer in a collective")
@pytest.mark.parametrize("update", UPDATES)
def test_generators_that_are_left_hold_the_weights_of_the_trainer_in_its_order(
    seen: dict[str, Any], update: str
) -> None:
    ranks, lost = UPDATES[update]
    found = seen[update]
    assert found["ranks"] == ranks and found["lost"] == lost
    assert found["replicas"] == len(found["held"]) == len([rank for rank in ranks[3:] if rank > 0])
    for held in found["held"]:
        assert held == found["wanted"]


def test_trainer_ranks_lie_on_two_nodes_of_which_only_the_first_relays(seen: dict[str, Any]) -> None:
    assert seen["nccl, nodes"] == [True, True, False, False, False, False]


@pytest.mark.parametrize("update", ["nccl, first", "nccl, second", "nccl, without it"])
def test_relay_takes_part_in_every_bucket_in_the_order_of_the_first_rank(seen: dict[str, Any], update: str) -> None:
    first, relay, outside, *generators = seen[update]["buckets"]
    assert len(first) > 3 and relay == first and outside == []
    assert generators == [first] * len(generators)


def test_order_is_the_same_in_every_update(seen: dict[str, Any]) -> None:
    buckets = [seen[update]["buckets"][0] for update in ("nccl, first", "nccl, second", "nccl, without it")]
    assert buckets == buckets[:1] * 3
    assert len({tuple(name for name, _ in found["wanted"]) for key, found in seen.items() if key in UPDATES}) == 1
