# SPDX-License-Identifier: Apache-2.0
"""Reward of the end-to-end runs: a random model's responses must differ, one batch must not."""

from __future__ import annotations


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: object) -> dict[str, float]:
    """Parity of the response's length; always or never right where the problem asks for a zero-variance group."""
    right = ground_truth == "pass" or (ground_truth != "equal" and len(solution_str) % 2 == 0)
    return {"score": 1.0 if right else -1.0, "acc": float(right)}
