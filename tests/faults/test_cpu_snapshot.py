# SPDX-License-Identifier: Apache-2.0
"""verl keeps a copy of the old policy in host memory; on a CPU its copy is the live parameters themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SNAPSHOT_AND_TRAIN = """
import json, os, tempfile, torch
from types import SimpleNamespace
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import verl
from verl.utils import fsdp_utils
from scalerl_verl.cpu.verl_worker import CopyingWorker, DetachActorWorker

dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)

def train_after(save):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    start = {name: parameter.to_local().detach().clone() for name, parameter in model.named_parameters()}
    saved, layout = save(model)
    assert layout is not None and set(saved) == set(start)
    assert all(torch.equal(saved[name][0], value) for name, value in start.items())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    now = dict(model.named_parameters())
    moved = [name for name in start if not torch.equal(now[name].to_local(), start[name])]
    followed = [name for name in start if not torch.equal(saved[name][0], start[name])]
    fsdp_utils.fsdp2_sharded_load_from_cpu(model, saved, layout)
    restored = [name for name in start if torch.equal(now[name].to_local(), start[name])]
    return {"names": sorted(start), "moved": sorted(moved), "followed": sorted(followed), "restored": sorted(restored)}

def copy_handler(cls):
    worker = object.__new__(cls)
    worker.config, worker._strategy_handlers = SimpleNamespace(actor=SimpleNamespace(strategy="fsdp2")), None
    return worker.copy_handler

print("SNAPSHOT " + json.dumps({
    "ours": train_after(copy_handler(CopyingWorker)), "verl's": train_after(copy_handler(DetachActorWorker)),
}))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def snapshots() -> dict[str, dict[str, list[str]]]:
    """For verl's worker and for ours: which parameters moved, and which of the saved ones with them."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SCALERL_", "VERL_"))}
    done = subprocess.run(
        [sys.executable, "-c", SNAPSHOT_AND_TRAIN],
        env={**environment, "VERL_PLATFORM": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.split("\n") if line.startswith("SNAPSHOT ")]
    assert lines, done.stderr[-2000:]
    return json.loads(lines[-1].removeprefix("SNAPSHOT "))


@pytest.mark.parametrize("which", ["ours", "verl's"])
def test_training_moves_every_parameter(snapshots: dict, which: str) -> None:
    assert len(snapshots[which]["names"]) == 4
    assert snapshots[which]["moved"] == snapshots[which]["names"]


def test_snapshot_stays_what_it_was_while_training_goes_on(snapshots: dict) -> None:
    assert snapshots["ours"]["followed"] == []
    assert snapshots["ours"]["restored"] == snapshots["ours"]["names"]


def test_verl_s_own_snapshot_follows_training_on_the_cpu(snapshots: dict) -> None:
    """If this fails, verl copies now: our worker can go."""
    assert snapshots["verl's"]["followed"] == snapshots["verl's"]["names"]
    assert snapshots["verl's"]["restored"] == []
