# SPDX-License-Identifier: Apache-2.0
"""Compare the metrics of two runs that must have trained alike."""

from __future__ import annotations

import math

from tests.e2e.launching import VerlRun

_NOT_TRAINING = ("timing", "perf/", "actor/perf/", "mfu", "throughput")


def training_metrics(run: VerlRun) -> dict[tuple[int, str], float]:
    """(step, name) -> value, without timings and memory."""
    return {
        (step, name): value
        for step, metrics in run.metrics.items()
        for name, value in metrics.items()
        if not any(part in name for part in _NOT_TRAINING)
    }


def differences(first: VerlRun, second: VerlRun, relative: float, steps: set[int] | None = None) -> list[str]:
    """Metrics of ``steps`` that only one run has or that differ by more than ``relative`` (absolute below 1)."""
    one, other = (
        {key: value for key, value in training_metrics(run).items() if steps is None or key[0] in steps}
        for run in (first, second)
    )
    found = [f"only in one run: {key}" for key in sorted(one.keys() ^ other.keys())]
    for key in sorted(one.keys() & other.keys()):
        if one[key] is None and other[key] is None:
            continue  # NaN in both: the correlation of constant probabilities
        if None in (one[key], other[key]) or not math.isclose(one[key], other[key], rel_tol=relative, abs_tol=relative):
            found.append(f"{key}: {one[key]} and {other[key]}")
    return found
