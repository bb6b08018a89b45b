# SPDX-License-Identifier: Apache-2.0
"""Reader of the `run-<id>.wandb` file of a W&B run, offline or synced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scalerl_verl.scaling.logs.files import need
from scalerl_verl.scaling.logs.segments import Log, ReadError, split_attempts
from scalerl_verl.scaling.logs.values import LeftOut, read_numbers, read_step

PATTERN = "run-*.wandb"


def read_wandb(path: Path) -> list[Log]:
    """One file: one attempt at a run, and the run's name."""
    proto = need("wandb.proto.wandb_internal_pb2", "W&B offline runs", "wandb")
    rows: list[tuple[int, dict[str, float]]] = []
    began, name, left_out, faults = None, None, LeftOut(), dict[str, str]()
    for data in read_leveldb_log(path):
        record = proto.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            name = record.run.display_name or name
            if record.run.start_time.seconds:
                began = record.run.start_time.seconds + record.run.start_time.nanos * 1e-9
        if kind != "history":
            continue
        row: dict[str, Any] = {}
        for item in record.history.item:
            row[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        step = read_step(row.get("_step", record.history.step.num))
        if isinstance(step, str):
            left_out.add(step)
        else:
            own = {k: v for k, v in row.items() if not k.startswith("_")}
            rows.append((step, read_numbers(own, faults, f"{path} step {step}")))
    segments = split_attempts(rows, str(path), began)
    for segment in segments[1:]:
        segment.began = began
    return [Log(segments, name, faults=faults, notes=left_out.notes(str(path)))] if segments else []


def read_leveldb_log(path: Path) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format, which W&B writes after a header of 7 bytes.

    Blocks of 32 KiB hold chunks of (checksum 4, length 2, type 1) and data; types: 1 full, 2 first, 3 middle, 4 last. A
    run that was killed leaves a cut last record, which is dropped.
    """
    data = path.read_bytes()
    if data[:4] != b":W&B":
        raise ReadError(f"{path} is no W&B run file: it does not begin with ':W&B'")
    block, header = 32768, 7
    place, parts = header, []
    while place + header <= len(data):
        if block - place % block < header:
            place += block - place % block
            continue
        length = int.from_bytes(data[place + 4 : place + 6], "little")
        kind = data[place + 6]
        chunk = data[place + header : place + header + length]
        place += header + length
        if kind == 0 or len(chunk) < length:
            break
        parts.append(chunk)
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []
