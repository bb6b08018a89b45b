# SPDX-License-Identifier: Apache-2.0
"""The miniature's tables and fits: which recorded runs they compare, and the numbers they make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.evidence import compare, fits, recipes
from benchmarks.miniature import bench, runs
from scalerl_verl.scaling import sigmoid
from tests.unit.benchmarks.recorded_rows import BASE, CPU, SPREAD, cells, points, recorder, row


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch):
    """Take rows for the recorded ones."""
    return recorder(monkeypatch, runs, bench)


def test_every_recipe_has_a_label() -> None:
    assert set(runs.LABELS) == set(bench.RECIPES)


def test_differences_are_taken_within_seeds() -> None:
    def of(*scores: float) -> dict[str, Any]:
        return points([0, 8, 16], [0, 100, 10_000], list(scores))

    mine = {0: of(0.1, 0.2, 0.5), 1: of(0.1, 0.3, 0.7), 2: of(0.1, 0.4, 0.9), 7: of(0, 0, 0)}
    theirs = {0: of(0.1, 0.2, 0.4), 1: of(0.1, 0.3, 0.5), 2: of(0.1, 0.4, 0.6)}
    assert runs.score_at(theirs[0], 1_000) == pytest.approx(0.3)
    differences = runs.paired(mine, theirs, 10_000)
    assert differences == pytest.approx([0.1, 0.2, 0.3])
    # Student's t with two degrees of freedom: 4.303 at 97.5%, 1.061 at 80%; standard deviation 0.1
    assert compare.half_width(differences) == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)
    assert compare.detectable(differences) == pytest.approx((4.303 + 1.061) * 0.1 / 3**0.5, rel=1e-3)


@pytest.mark.parametrize("tokens", [99, 10_001])
def test_no_pass_rate_outside_of_the_validations(tokens: int) -> None:
    """Not that of the nearest: a run validated late would be told to be where it was not yet."""
    assert runs.score_at(points([0, 8, 16], [0, 100, 10_000], [0.1, 0.2, 0.4]), tokens) is None


def test_runs_validated_at_other_steps_are_compared_on_the_same_ones() -> None:
    """A bent curve, equal in both: each run's own points would make a difference of .02 of their distance alone."""
    tokens = [0, 1e5, 2e5, 4e5, 8e5]
    dense = points([0, 16, 32, 48, 64], tokens, [0.1, 0.3, 0.5, 0.58, 0.6])
    sparse = points([0, 32, 64], [0, 2e5, 8e5], [0.1, 0.5, 0.6])
    assert runs.score_at(dense, 4e5) - runs.score_at(sparse, 4e5) == pytest.approx(0.03)
    assert runs.paired({0: dense}, {0: sparse}, 4e5) == [0]
    assert runs.paired({0: dense}, {0: sparse}, 1.5e5) == []
    assert runs.paired({0: dense}, {0: dense}, 1.5e5) == [0]


def test_runs_of_another_k_size_or_number_of_problems_do_not_leak(record, tmp_path: Path) -> None:
    record(BASE + SPREAD)
    before = [recipes.comparison_table(), fits.fits_table()]
    others = [{"problems": 16384}, {"k": 1}, {"size": "3M"}]
    record(
        [*BASE, *SPREAD, *(row(r, s, rise=0.03, **o) for o in others for r in ("scalerl", "dapo") for s in (0, 1, 9))]
    )
    assert [recipes.comparison_table(), fits.fits_table()] == before
    bench.write_curves(tmp_path)
    folders = {"0.3M.k8", "0.3M.k8.16384", "0.3M.k1", "3M.k8"}
    assert {path.name for path in tmp_path.iterdir()} == folders
    assert not (tmp_path / "0.3M.k8" / "scalerl.seed9.csv").exists()
    curves = {folder: (tmp_path / folder / "scalerl.seed0.csv").read_text() for folder in folders}
    assert curves["0.3M.k8"] != curves["0.3M.k8.16384"] == curves["0.3M.k1"]
    assert curves["0.3M.k8"].splitlines()[1].startswith("160000,")


def test_a_recipe_is_of_one_machine() -> None:
    """Rows of the newest recording's machine, all of them; not the seeds that only an older one has."""
    rows = [row("grpo", s, last=32) for s in (0, 1, 2)] + [row("grpo", s, hardware=CPU) for s in (1, 0)]
    found = runs.select_rows(rows, runs.Group())["grpo"]
    assert {seed: made["hardware"] for seed, made in found.items()} == {0: CPU, 1: CPU}
    # a try that is shorter, or on fewer held-out problems, replaces nothing; a longer recording does
    few = {**rows[-1], "case": {**rows[-1]["case"], "test_problems": 200}}
    assert runs.select_rows([*rows, few], runs.Group())["grpo"] == {0: rows[4], 1: rows[3]}
    assert runs.select_rows([*rows, row("grpo", 0, last=16)], runs.Group())["grpo"] == {0: rows[4], 1: rows[3]}
    again = [row("grpo", s, last=320) for s in (0, 1)]
    assert runs.select_rows([*rows, *again], runs.Group())["grpo"] == {0: again[0], 1: again[1], 2: rows[2]}


def test_a_recipe_recorded_later_on_another_machine_is_one_more_line(record) -> None:
    label = "forced interruption left out"
    short = [row("no_forced_interruption", s, last=16) for s in (0, 1, 2)]
    record(BASE + short)
    assert label not in recipes.comparison_table()
    late = [
        row("no_forced_interruption", s, rise=0.02 + 0.001 * s, hardware=CPU, every=32, noise=0.01) for s in (0, 1, 2)
    ]
    record(BASE + short + late)
    text = recipes.comparison_table()
    assert cells(text, label)[1] == ""  # its first validation comes later
    assert cells(text, label)[4] == f"{0.11 + 0.021 * np.log(6e5):.3f}"
    assert cells(text, label)[5] == f"{0.001 * np.log(6e5):+.3f} ± {4.303 * 0.001 * np.log(6e5) / 3**0.5:.3f}"
    assert cells(fits.fits_table(), label)[0] == label


def test_runs_of_another_learning_rate_are_not_compared(record) -> None:
    record([*BASE, row("dapo", lr=1e-3)])
    with pytest.raises(ValueError, match=r"differ in lr: 0.0005 \(grpo\), 0.001 \(dapo\)"):
        recipes.comparison_table()


def test_a_difference_of_one_seed_has_no_interval(record) -> None:
    record([*BASE, row("dapo", rise=0.03)])
    assert cells(recipes.comparison_table(), "DAPO (1 seed)")[2:4] == ["fewer than two seeds", ""]


def test_a_seed_that_the_reference_did_not_run_so_far_is_told(record) -> None:
    """Otherwise the mean beside the difference would be taken for one of the same seeds."""
    record([*BASE[:2], row("scalerl", 2, noise=0.01, last=32), *BASE[3:]])
    assert cells(recipes.comparison_table(), "GRPO")[5].endswith(" (2 of 3 seeds)")
    record(BASE)
    assert "of 3 seeds" not in recipes.comparison_table()


def _curves(num: int, spread: float) -> dict[int, dict[str, Any]]:
    rng = np.random.default_rng(3)
    tokens = np.array([0, *np.geomspace(1e5, 2e6, 12)])
    made = {}
    for seed in range(num):
        ceiling = 0.75 + spread * rng.standard_normal()
        scores = sigmoid(np.maximum(tokens, 1e-9), ceiling, 1.2, 1.5e5, 0.25 + spread * rng.standard_normal())
        made[seed] = points(list(range(0, 208, 16)), list(tokens * (1 + 0.01 * seed)), list(scores))
    return made


def test_resampled_ceilings_are_those_of_the_fit() -> None:
    """Solved all at once, against fit_curve one after the other on the same draws."""
    curves = _curves(5, 0.02)
    found = fits.resampled_ceilings(curves, 12, seed=4)
    drawn = np.random.default_rng(4).integers(0, 5, (12, 5))
    alone = [fits.fit_mean({place: curves[seed] for place, seed in enumerate(seeds)}).A for seeds in drawn]
    assert np.std(alone) > 0.003
    assert found == pytest.approx(alone, abs=1e-5)


def test_interval_over_seeds_is_as_wide_as_their_spread() -> None:
    """The ceiling of a mean of 8 seeds: 1.96 standard errors to each side, of the spread that they have."""
    curves = _curves(8, 0.02)
    ceilings = [fits.fit_mean({0: curve}).A for curve in curves.values()]
    low, high = fits.seeds_interval(curves)
    assert (high - low) / 2 == pytest.approx(1.96 * np.std(ceilings) / 8**0.5, rel=0.1)
    assert low < np.mean(ceilings) < high


def test_seeds_are_averaged_at_the_steps_that_all_have() -> None:
    mine = points([0, 16, 32], [0, 10, 20], [0.1, 0.2, 0.3])
    other = points([0, 32], [0, 40], [0.3, 0.5])
    tokens, scores, errors = fits.average(fits.stack({0: mine, 1: other}))
    assert tokens.tolist() == [0, 30] and scores == pytest.approx([0.2, 0.4])
    assert errors == pytest.approx([0.01 / 2**0.5] * 2)


def test_no_comparison_is_called_significant_that_chance_among_all_explains() -> None:
    """Holm's method by hand: .01 x 3, .02 x 2, .04 x 1 of three; the larger stays above the smaller before it."""
    assert compare.holm({"b": 0.02, "a": 0.01, "c": 0.04}) == pytest.approx({"a": 0.03, "b": 0.04, "c": 0.04})
    assert compare.holm({"a": 0.02, "b": 0.021}) == pytest.approx({"a": 0.04, "b": 0.04})


def test_a_folder_without_models_is_told_how_to_make_them(tmp_path: Path) -> None:
    (tmp_path / "3").mkdir()
    with pytest.raises(ValueError, match=rf"holds no warm-started model.*prepare.py --out {tmp_path}/0 --seed 0"):
        bench.find_seeds(tmp_path, None)
    for seed in (3, 10):
        (tmp_path / str(seed) / "model").mkdir(parents=True)
        (tmp_path / str(seed) / "model" / "config.json").write_text("{}")
    assert bench.find_seeds(tmp_path, None) == [3, 10]
    assert bench.find_seeds(tmp_path, [10]) == [10]
    with pytest.raises(ValueError, match=r"models of seeds 3, 10, and --seeds 3 4 were asked for.*--seed 4"):
        bench.find_seeds(tmp_path, [3, 4])
