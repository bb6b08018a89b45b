# SPDX-License-Identifier: Apache-2.0
"""Which setting curves favour for a budget."""

from __future__ import annotations

import json

import numpy as np
import pytest

from scalerl_verl.scaling import fit_curve, sigmoid
from scalerl_verl.scaling.fit.advice import advise, best_by_budget, supported_budgets
from scalerl_verl.scaling.fit.result import CurveFit
from scalerl_verl.scaling.fit.settings import read_settings

PATTERN = r"n(?P<n>\d+)-b(?P<batch>\w+)"


def make_fit(A: float, C_mid: float, seed: int = 0, last: float = 40000.0) -> CurveFit:
    rng = np.random.default_rng(seed)
    compute = np.concatenate([[0.0], np.linspace(300, last, 50)])
    return fit_curve(compute, sigmoid(compute, A, 1.8, C_mid, 0.2) + 0.004 * rng.standard_normal(51))


@pytest.fixture(scope="module")
def fits() -> dict[str, CurveFit]:
    """Few responses are quicker at first, many end higher; the seeds of one setting are two runs."""
    return {
        "n8-b1k-s0": make_fit(0.58, 2000.0, 0),
        "n8-b1k-s1": make_fit(0.58, 2000.0, 1),
        "n16-b1k": make_fit(0.66, 6000.0, 2),
        "n32-b1k": make_fit(0.665, 6100.0, 3),
    }


@pytest.fixture(scope="module")
def settings(fits: dict[str, CurveFit]) -> dict[str, dict[str, float]]:
    return read_settings(fits, PATTERN)


def test_best_setting_changes_with_the_budget(fits: dict[str, CurveFit], settings: dict[str, dict[str, float]]) -> None:
    early, late = advise(fits, settings, 2000.0), advise(fits, settings, 35000.0)
    assert early.candidates[0].settings == {"n": 8.0, "batch": 1000.0} and not early.tied
    assert early.candidates[0].runs == ("n8-b1k-s0", "n8-b1k-s1")
    assert {c.settings["n"] for c in (late.candidates[0], *late.tied)} == {16.0, 32.0}
    assert not late.candidates[-1].is_tied and late.candidates[-1].settings["n"] == 8.0
    assert early.edges == {"n": "smallest"}, "batch was not varied"
    budgets = supported_budgets(fits)
    assert budgets[0] == pytest.approx(300) and budgets[-1] == pytest.approx(40000)
    found = best_by_budget(fits, settings, budgets)
    assert found[1][1] == "n=8, batch=1000" and found[-1][1].startswith(("n=16", "n=32"))
    json.dumps(late.to_dict(), allow_nan=False)


def test_equal_settings_are_tied_and_more_seeds_know_more(settings: dict[str, dict[str, float]]) -> None:
    seeds = {f"n{n}-b1k-s{seed}": make_fit(0.6, 4000.0, 10 * n + seed) for n in (8, 16) for seed in range(3)}
    advice = advise(seeds, read_settings(seeds, PATTERN), 30000.0)
    assert [c.is_tied for c in advice.candidates] == [True, True]
    single = {name: fit for name, fit in seeds.items() if name.endswith("s0")}
    alone = advise(single, read_settings(single, PATTERN), 30000.0)
    widths = [np.diff(found.candidates[0].interval)[0] for found in (advice, alone)]
    assert widths[0] < widths[1]


def test_run_that_says_nothing_about_the_budget_is_left_out(fits: dict[str, CurveFit]) -> None:
    runs = {**fits, "n4-b1k": make_fit(0.6, 4000.0, 4, last=3000.0)}
    advice = advise(runs, read_settings(runs, PATTERN), 35000.0)
    assert list(advice.left_out) == ["n4-b1k"] and "ends at 3000" in advice.left_out["n4-b1k"]
    far = advise(runs, read_settings(runs, PATTERN), 1e6)
    assert far.candidates == () and len(far.left_out) == 5 and far.edges == {}
    assert "first point is at 300" in advise(runs, read_settings(runs, PATTERN), 10.0).left_out["n16-b1k"]


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan"), float("inf")])
def test_budget_that_is_none_is_refused(
    budget: float, fits: dict[str, CurveFit], settings: dict[str, dict[str, float]]
) -> None:
    with pytest.raises(ValueError, match="budget="):
        advise(fits, settings, budget)


def test_runs_of_one_setting_are_refused(fits: dict[str, CurveFit], settings: dict[str, dict[str, float]]) -> None:
    one = {name: fit for name, fit in fits.items() if name.startswith("n8")}
    with pytest.raises(ValueError, match="same settings"):
        advise(one, settings, 1000.0)


@pytest.mark.parametrize(
    ("names", "pattern", "wanted"),
    [
        (["qwen-0.5B-a", "qwen-7b"], r"-(?P<size>[\d.]+[bB])", [{"size": 5e8}, {"size": 7e9}]),
        (["n16-b1k"], PATTERN, [{"n": 16.0, "batch": 1000.0}]),
        (["lr1e-6"], r"lr(?P<lr>[\de-]+)", [{"lr": 1e-6}]),
    ],
)
def test_settings_are_read_from_names(names: list[str], pattern: str, wanted: list[dict[str, float]]) -> None:
    assert read_settings(names, pattern) == dict(zip(names, wanted, strict=True))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "no regular expression"),
        (r"n(\d+)", "names no setting"),
        (r"m(?P<m>\d+)", "not found in the run name n16-b1k"),
        (r"-(?P<batch>\w)", "batch of the run n16-b1k: 'b' is no positive number"),
    ],
)
def test_pattern_that_finds_nothing_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_settings(["n16-b1k"], pattern)
