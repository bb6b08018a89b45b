# SPDX-License-Identifier: Apache-2.0
"""Reward of the end-to-end runs: what a group of responses gets is known beforehand, whatever a random model says."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

_FIRST = re.compile(r"(\d+) of (\d+)")
_graded: collections.Counter[int] = collections.Counter()
_lock = threading.Lock()


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: object
) -> dict[str, float]:
    """By ``ground_truth``: ``pass`` is always right, ``equal`` never, ``k of n`` the first k of n responses graded.

    Every other one (``even``) goes by the response: the parity of its length.

    Which responses of a ``k of n`` group are right depends on the order in which they arrive; how many does not. That
    needs one process that grades (``reward.num_workers=1``), and groups of n.
    """
    if first := _FIRST.fullmatch(ground_truth):
        assert extra_info is not None
        with _lock:
            place = _graded[extra_info["index"]]
            _graded[extra_info["index"]] += 1
        right = place % int(first[2]) < int(first[1])
    else:
        right = ground_truth == "pass" or (ground_truth != "equal" and len(solution_str) % 2 == 0)
    return {"score": 1.0 if right else -1.0, "acc": float(right)}


async def gated_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], **_: object
) -> dict[str, float]:
    """The same, but a problem that the probe's gate lists has to wait: its group stays unfinished."""
    gate = Path(os.environ["PROBE_DIR"], "gate.json")
    while extra_info["index"] in _listed(gate):
        await asyncio.sleep(0.05)
    return compute_score(data_source, solution_str, ground_truth, extra_info)


async def faulty_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], **_: object
) -> dict[str, float]:
    """The same, but what the probe's ``faults.json`` lists by row raises, hangs, waits, or has no number for it."""
    faults = _read_faults()
    while extra_info["index"] in faults.get("waiting", ()):
        await asyncio.sleep(0.05)
        faults = _read_faults()
    if extra_info["index"] in faults.get("raising", ()):
        raise RuntimeError("planted fault: this reward cannot be computed")
    if extra_info["index"] in faults.get("hanging", ()):
        await asyncio.sleep(1e6)
    result = compute_score(data_source, solution_str, ground_truth, extra_info)
    return {**result, "score": float("nan")} if extra_info["index"] in faults.get("poisoned", ()) else result


def _read_faults() -> dict[str, list[int]]:
    try:
        return json.loads(Path(os.environ["PROBE_DIR"], "faults.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # it is being written
        return {}


def _listed(gate: Path) -> list[int]:
    try:
        return json.loads(gate.read_text())
    except FileNotFoundError:
        return []
