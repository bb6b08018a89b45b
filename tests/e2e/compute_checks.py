# SPDX-License-Identifier: Apache-2.0
"""What the compute ledger of a finished run must say, in its metrics and in its log."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from scalerl_verl.json_lines import read_records
from scalerl_verl.ledger.verl import LOG_FILE
from tests.e2e.launching import VerlRun


def check_ledger(run: VerlRun, num_gpus: int, wall_s: float) -> None:
    """Every step adds its tokens, and its time on all devices.

    Args:
        run: its metrics are read.
        num_gpus: devices of trainer and generators together.
        wall_s: of all attempts, from launch to exit.
    """
    metrics = {step: run.metrics[step] for step in sorted(run.metrics) if step > 0}
    for step, values in metrics.items():
        assert values["scalerl/compute/steps"] == step
        assert 0 <= values["scalerl/compute/trained_tokens"] <= values["scalerl/compute/generated_tokens"]
    for before, after in pairwise(metrics):
        old, new = metrics[before], metrics[after]
        own = new["scalerl/data/generated_tokens_sum"]
        assert new["scalerl/compute/generated_tokens"] == old["scalerl/compute/generated_tokens"] + own
        spent_s = 3600 * (new["scalerl/compute/gpu_hours"] - old["scalerl/compute/gpu_hours"])
        # These parts of a step follow each other; a device that is not counted leaves less than this.
        assert spent_s > num_gpus * (new["timing_s/gen"] + new["timing_s/update_actor"]) > 0, (after, spent_s)
    last = metrics[max(metrics)]
    assert last["scalerl/compute/trained_tokens"] > 0 and last["scalerl/compute/model_flops"] > 0
    assert 3600 * last["scalerl/compute/gpu_hours"] < num_gpus * wall_s


def read_states(run: VerlRun) -> list[dict[str, Any]]:
    """The ledger's log: its state after each step of each attempt."""
    return read_records(run.folder / "checkpoints" / LOG_FILE)
