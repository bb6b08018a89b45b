# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of the CPU verify before they measure, on small inputs: they must not rot between recordings."""

from __future__ import annotations

import pytest

from scalerl_verl.upstream.activation import ACTIVE_ENV


def test_advantage_benchmark_agrees_with_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ACTIVE_ENV, "1")
    from benchmarks.advantage import bench

    batch = bench.make_batch(64, 48)
    assert bench.verify(batch) < 1e-5
    assert {impl: len(run(batch)) for impl, run in bench.IMPLS.items()} == dict.fromkeys(bench.IMPLS, 64)


def test_fit_benchmark_is_not_worse_than_the_literal_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.fit import bench

    small = bench.Grid(A=bench.np.array([0.60, 0.64, 0.66]), C_mid=bench.np.linspace(4000, 12000, 9))
    literal, quick = bench.search_literally, bench.search
    monkeypatch.setattr(bench, "search_literally", lambda *points: literal(*points, small))
    monkeypatch.setattr(bench, "search", lambda *points: quick(*points, small))
    sums = bench.verify(*bench.make_points(40))
    assert set(sums) == {bench.DEFAULT, bench.QUICK, bench.LITERAL}
