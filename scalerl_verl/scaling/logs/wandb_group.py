# SPDX-License-Identifier: Apache-2.0
"""The field `group` of a W&B run, by which seeds of one recipe are put together."""

from __future__ import annotations

from pathlib import Path

from scalerl_verl.scaling.logs.files import need
from scalerl_verl.scaling.logs.wandb_runs import read_leveldb_log


def read_wandb_group(path: Path) -> str:
    """The group that a `run-<id>.wandb` file names first; empty if none.

    Raises:
        ReadError: wandb is missing, or the file is no run of it.
    """
    proto = need("wandb.proto.wandb_internal_pb2", "W&B offline runs", "wandb")
    for data in read_leveldb_log(path):
        record = proto.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run" and record.run.run_group:
            return str(record.run.run_group)
    return ""
