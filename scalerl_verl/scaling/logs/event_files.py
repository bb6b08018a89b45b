# SPDX-License-Identifier: Apache-2.0
"""Reader of TensorBoard's event files. A folder with event files is a run, as in TensorBoard itself."""

from __future__ import annotations

from pathlib import Path

from scalerl_verl.scaling.logs.files import need
from scalerl_verl.scaling.logs.segments import Log, Segment
from scalerl_verl.scaling.logs.values import LeftOut, read_step

PATTERN = "events.out.tfevents.*"


def read_events(path: Path) -> list[Log]:
    """One event file: one attempt. Of a tag that is written twice at a step the later value counts."""
    module = need("tensorboard.backend.event_processing.event_file_loader", "TensorBoard event files", "tensorboard")
    util = need("tensorboard.util.tensor_util", "TensorBoard event files", "tensorboard")
    began, num_read, left_out = None, 0, LeftOut()
    # Tags of one step may be written in any order, a later attempt has a file of its own.
    segment = Segment({}, None, str(path))
    for event in module.EventFileLoader(str(path)).Load():
        num_read += 1
        began = event.wall_time if began is None else began
        for value in event.summary.value:
            if not value.HasField("tensor"):
                continue
            array = util.make_ndarray(value.tensor)
            if array.size != 1 or array.dtype.kind not in "fiu":
                continue
            step = read_step(int(event.step))
            if isinstance(step, str):
                left_out.add(step, value.tag)
                continue
            segment.add(step, {value.tag: float(array.reshape(-1)[0])})
    notes = left_out.notes(str(path))
    num_records, is_cut = count_records(path)
    if num_read < num_records:
        notes.append(f"{path}: {num_records - num_read} of {num_records} records cannot be read: the file is damaged")
    elif is_cut:
        notes.append(f"{path}: its last record was cut off, which leaves out what would follow")
    segment.began = began
    return [Log([segment], notes=notes)] if segment.steps or notes else []


def count_records(path: Path) -> tuple[int, bool]:
    """Records of a file by their lengths alone, and whether the last one is cut.

    A record is: length (8 bytes), checksum of it (4), data, checksum of them (4). TensorBoard's loader stops without a
    word where a checksum is wrong.
    """
    size, place, number = path.stat().st_size, 0, 0
    with path.open("rb") as stream:
        while place + 12 <= size:
            stream.seek(place)
            length = int.from_bytes(stream.read(8), "little")
            if place + 12 + length + 4 > size:
                return number, True
            place += 12 + length + 4
            number += 1
    return number, place < size
