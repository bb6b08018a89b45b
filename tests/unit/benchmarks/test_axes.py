# SPDX-License-Identifier: Apache-2.0
"""What the miniature's comparisons hang on: what is held equal, and one contrast instead of three."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.evidence import axes
from benchmarks.evidence.compare import MAIN
from benchmarks.miniature import runs
from tests.unit.benchmarks.recorded_rows import points, row


def run(prompts: list[int | None], kept: list[float | None]) -> dict:
    return {**points([0, 8, 16], [0, 100, 300], [0.1, 0.2, 0.3]), "prompts": prompts, "kept_fraction": kept}


def test_flops_count_trained_tokens_three_times_as_much_as_sampled_ones() -> None:
    """Of 8 FLOPs a token that is both, 2 sample it."""
    plain = run([None, 256, 256], [None, 1.0, 1.0])
    assert axes.flops(plain) == [0, 100, 300]
    # half of what DAPO samples up to the first validation, then a quarter of it, is trained on
    replaced = run([None, 512, 1024], [None, 1.0, 1.0])
    assert axes.flops(replaced) == pytest.approx([0, 100 * 5 / 8, 100 * 5 / 8 + 200 * 3.5 / 8])
    dropped = run([None, 256, 256], [None, 0.5, 0.25])
    assert axes.flops(dropped) == [0, 100, 300]
    assert axes.flops_without_equal(dropped) == pytest.approx([0, 100 * 5 / 8, 100 * 5 / 8 + 200 * 3.5 / 8])


def test_contrast_is_the_mean_of_the_three_baselines_within_seeds() -> None:
    """They rise by .001, .002 and .006 more an e-fold: .003 in the mean."""
    rows = [row(name, seed, rise=rise) for name, rise in zip(MAIN, (0.02, 0.021, 0.022, 0.026)) for seed in (0, 1)]
    found = runs.points_of({name: {r["case"]["seed"]: r for r in rows if r["impl"] == name} for name in MAIN})
    assert axes.contrast(found, "scalerl", 3e5) == pytest.approx([0.003 * np.log(3e5)] * 2)
