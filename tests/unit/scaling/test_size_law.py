# SPDX-License-Identifier: Apache-2.0
"""Power laws of ceiling and speed over sizes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from scalerl_verl.scaling import fit_curve, sigmoid
from scalerl_verl.scaling.fit.result import CurveFit
from scalerl_verl.scaling.fit.size_law import _line, fit_size_law

SIZES = (5e8, 1.5e9, 3e9, 7e9)
ERROR, ERROR_EXPONENT, HALF, HALF_EXPONENT = 0.5, -0.15, 4000.0, 0.3


def make_fit(size: float, seed: int, noise: float = 0.004, last: float = 60000.0) -> CurveFit:
    rng = np.random.default_rng(seed)
    compute = np.concatenate([[0.0], np.linspace(400, last, 50)])
    A = 1 - ERROR * (size / 5e8) ** ERROR_EXPONENT
    truth = sigmoid(compute, A, 1.6, HALF * (size / 5e8) ** HALF_EXPONENT, 0.2)
    return fit_curve(compute, truth + noise * rng.standard_normal(51))


@pytest.fixture(scope="module")
def fits() -> dict[str, CurveFit]:
    return {f"run-{size:g}": make_fit(size, seed) for seed, size in enumerate(SIZES)}


def sizes_of(fits: dict[str, CurveFit]) -> dict[str, float]:
    return {name: float(name.removeprefix("run-")) for name in fits}


def test_exponents_and_predictions_are_those_of_the_law(fits: dict[str, CurveFit]) -> None:
    law = fit_size_law(fits, sizes_of(fits))
    assert law.left_out == {}
    assert law.error.exponent_interval[0] < ERROR_EXPONENT < law.error.exponent_interval[1] < 0
    assert law.half.exponent_interval[0] < HALF_EXPONENT < law.half.exponent_interval[1]
    A, (low, high) = law.A_at(1.4e10)
    assert low < 1 - ERROR * 28**ERROR_EXPONENT < high and low < A < high < 1
    assert law.C_mid_at(1.4e10)[0] == pytest.approx(HALF * 28**HALF_EXPONENT, rel=0.1)
    assert law.is_beyond(1.4e10) and not law.is_beyond(2e9)
    # Far from the sizes that were measured less is known.
    width = [law.A_at(size)[1][1] - law.A_at(size)[1][0] for size in (2e9, 1.4e10, 1e12)]
    assert width == sorted(width)
    json.dumps(law.to_dict([1.4e10]), allow_nan=False)


def test_line_of_equal_weights_is_that_of_least_squares() -> None:
    x, y = np.array([0.0, 1.0, 2.0, 4.0]), np.array([1.0, 2.5, 2.0, 5.0])
    line = _line(x, y, np.full(4, 0.3), 0.95)
    slope, offset = np.polyfit(x, y, 1)
    assert line.exponent == pytest.approx(slope, rel=1e-12)
    assert line.at(1.0)[0] == pytest.approx(np.exp(offset), rel=1e-12)


@pytest.mark.parametrize("num", [3, 5])
def test_interval_of_the_exponent_holds_it_as_often_as_it_says(num: int) -> None:
    """Binomial: 95% of 4,000 draws is seen within .7%; the prior of the scale makes it conservative."""
    rng, x = np.random.default_rng(0), np.linspace(0, 2, num)
    variance = np.full(num, 0.2**2)
    held = []
    for _ in range(4000):
        low, high = _line(x, 1 + 0.5 * x + 0.2 * rng.standard_normal(num), variance, 0.95).exponent_interval
        held.append(low < 0.5 < high)
    assert 0.94 < np.mean(held) < 0.99


def test_run_without_an_identified_ceiling_is_left_out_and_named(fits: dict[str, CurveFit]) -> None:
    short = {**fits, "run-1e9": make_fit(1e9, 9, last=2000.0)}
    law = fit_size_law(short, sizes_of(short))
    assert list(law.left_out) == ["run-1e9"] and "not identified" in law.left_out["run-1e9"]
    assert 1e9 not in law.sizes


def test_two_sizes_are_refused_with_what_was_left_out(fits: dict[str, CurveFit]) -> None:
    few = {name: fits[name] for name in list(fits)[:2]} | {"run-1e9": make_fit(1e9, 9, last=2000.0)}
    with pytest.raises(ValueError, match=r"3 sizes or more .* got 2 \(5e\+08, 1.5e\+09\); run-1e9 is left out"):
        fit_size_law(few, sizes_of(few))
