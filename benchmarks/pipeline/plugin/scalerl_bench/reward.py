# SPDX-License-Identifier: Apache-2.0
"""Reward of the pipeline benchmark."""

from __future__ import annotations

import zlib


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: object) -> float:
    """A quarter of all responses is right, by a hash: there is nothing to learn, so lengths and load stay the same."""
    return float(zlib.crc32(solution_str.encode()) % 4 == 0)
