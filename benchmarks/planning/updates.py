# SPDX-License-Identifier: Apache-2.0
"""Weight updates as planned: for large models on many GPUs, and beside what was measured on two."""

from __future__ import annotations

from benchmarks.markdown import table
from benchmarks.rows import read_rows
from scalerl_verl.names import DEVICE, HOST
from scalerl_verl.pipeline.transfer import sent_weights
from scalerl_verl.planning.balance import Assumptions
from scalerl_verl.planning.layout import GIB
from scalerl_verl.planning.update import GPUS_OF_A_HOST, Update
from scalerl_verl.shapes import find_shape

MODELS = {"Qwen/Qwen3-8B-Base": 1, "Qwen/Qwen3-30B-A3B-Base": 2, "Qwen/Qwen3-235B-A22B": 8}
"""Id -> GPUs of an engine."""
TRAINERS, GENERATORS = 16, 64
BF16 = 2


def plan_update(model: str, ranks: int, staging: str) -> Update:
    """What a plan of such a run holds, with the network that it assumes."""
    network = Assumptions.network_gbs * 1e9
    sent = float(sum(sent_weights(find_shape(model))) * BF16)
    return Update(sent, TRAINERS, GPUS_OF_A_HOST, GENERATORS, ranks, staging, network)


def updates_table() -> str:
    """One line a model and place in which weights wait."""
    lines = []
    for model, ranks in MODELS.items():
        for staging in (DEVICE, HOST):
            update = plan_update(model, ranks, staging)
            lines.append(
                (
                    f"{model.removeprefix('Qwen/')}, TP {ranks}",
                    staging,
                    f"{update.sent_bytes / GIB:,.1f}",
                    f"{update.blocked_s:.2f}",
                    f"{update.pause_s:.3f}",
                )
            )
    return table(("model", "staging", "sent GiB", "trainers wait s", "generators stand still s"), lines)


def measured_table() -> str:
    """One line a recorded run with `keep` on two GPUs of one host: seconds measured, p50, and planned."""
    found = {
        (row["run_id"], row["metric"]): row
        for row in read_rows("pipeline")
        if row["impl"] == "pipeline_rl keep" and row["case"]["regime"] == "generation-bound" and row["num_devices"] == 2
    }
    lines = []
    for run_id in dict.fromkeys(run_id for run_id, metric in found if metric == "sent_gib"):
        sent, update, pause = (found[run_id, metric] for metric in ("sent_gib", "update_s", "pause_s"))
        network = Assumptions.network_gbs * 1e9
        planned = Update(sent["p50"] * GIB, 1, 1, 1, 1, DEVICE, network)
        lines.append(
            (
                f"{sent['p50']:.2f}", f"{update['p50']:.3f}", f"{planned.blocked_s:.3f}",
                f"{1e3 * pause['p50']:.1f}", f"{1e3 * planned.pause_s:.1f}", f"`{sent['commit'][:10]}`",
            )
        )  # fmt: skip
    heads = ("sent GiB", "update s", "planned", "stand still ms", "planned", "commit")
    return table(heads, lines)
