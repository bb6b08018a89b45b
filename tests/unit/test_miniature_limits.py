# SPDX-License-Identifier: Apache-2.0
"""What the miniature's comparisons hang on: axes, one contrast, roughness, what two seeds show."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.evidence import limits
from benchmarks.evidence import recipes as table
from benchmarks.miniature import runs
from tests.recorded_rows import BASE, points, recorder, row


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch):
    """Take rows for the recorded ones."""
    return recorder(monkeypatch, runs)


def run(prompts: list[int | None], kept: list[float | None]) -> dict:
    return {**points([0, 8, 16], [0, 100, 300], [0.1, 0.2, 0.3]), "prompts": prompts, "kept_fraction": kept}


def test_flops_count_trained_tokens_three_times_as_much_as_sampled_ones() -> None:
    """Of 8 FLOPs a token that is both, 2 sample it."""
    plain = run([None, 256, 256], [None, 1.0, 1.0])
    assert limits.flops("grpo", plain) == [0, 100, 300]
    # half of what DAPO samples up to the first validation, then a quarter of it, is trained on
    replaced = run([None, 512, 1024], [None, 1.0, 1.0])
    assert limits.flops("dapo", replaced) == pytest.approx([0, 100 * 5 / 8, 100 * 5 / 8 + 200 * 3.5 / 8])
    dropped = run([None, 256, 256], [None, 0.5, 0.25])
    assert limits.flops("scalerl", dropped) == [0, 100, 300]
    assert limits.flops_without_equal("scalerl", dropped) == pytest.approx(
        [0, 100 * 5 / 8, 100 * 5 / 8 + 200 * 3.5 / 8]
    )


def test_contrast_is_the_mean_of_the_three_baselines_within_seeds() -> None:
    """They rise by .001, .002 and .006 more an e-fold: .003 in the mean."""
    rows = [
        row(name, seed, rise=rise) for name, rise in zip(table.MAIN, (0.02, 0.021, 0.022, 0.026)) for seed in (0, 1)
    ]
    found = runs.points_of({name: {r["case"]["seed"]: r for r in rows if r["impl"] == name} for name in table.MAIN})
    assert limits.contrast(found, "scalerl", 3e5) == pytest.approx([0.003 * np.log(3e5)] * 2)


def test_roughness_is_the_noise_of_one_validation() -> None:
    """Second differences of independent noise have six times its variance; a straight line has none."""
    steps = list(range(0, 16 * 4000, 16))
    line = np.linspace(0.1, 0.9, len(steps))
    noisy = line + np.random.default_rng(0).normal(0, 0.02, len(steps))
    made = [points(steps, [10.0 * step for step in steps], list(scores)) for scores in (line, noisy)]
    assert limits.roughness({0: made[0]}) == pytest.approx(0, abs=1e-12)
    # 4,000 points know a standard deviation to about 2%
    assert limits.roughness({0: made[1]}) == pytest.approx(0.02, rel=0.06)


def test_two_seeds_show_ten_standard_deviations(record) -> None:
    """Student's t with one degree of freedom: 12.706 at 97.5% and 1.376 at 80%, over the root of two."""
    record([*BASE, *(row("dapo", seed, rise=0.021 + 0.001 * seed, noise=0.01) for seed in (0, 1, 2))])
    spread = 0.001 * np.log(1.8e6)
    assert f"to {(12.706 + 1.376) / 2**0.5 * spread:.2f} in 80% of tries" in limits.two_seeds_text()


def test_parts_wait_for_all_runs(record) -> None:
    record(BASE)
    assert {part() for part in limits.PARTS.values()} == {limits.NOT_YET}
