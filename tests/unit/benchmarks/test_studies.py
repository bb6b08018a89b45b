# SPDX-License-Identifier: Apache-2.0
"""Tables of studies: settings side by side, differences within seeds at equal steps."""

from __future__ import annotations

import pytest

from benchmarks.evidence import studies
from tests.unit.benchmarks.recorded_rows import points, row


def run(name: str, seed: int, lr: float, last: float, study: str | None = "rate") -> dict:
    made = row(name, seed)
    curve = {**points([0, 16, 32], [0, 100, 200], [0.1, 0.3, last])}
    curve |= {"clipped": [None, 0.01, 0.03], "log_ratio": [None, 0.1, 0.3]}
    return {**made, "case": {**made["case"], "lr": lr, "study": study, "seed": seed}, "points": curve}


def test_line_has_differences_to_scalerl_at_the_same_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        *(run("grpo", seed, 1e-4, 0.5 + seed / 10) for seed in (0, 1)),
        *(run("scalerl", seed, 1e-4, 0.6 + seed / 10) for seed in (0, 1)),
        *(run("scalerl", seed, 2e-4, 0.9) for seed in (0, 1)),
        *(run("scalerl", seed, 1e-4, 0.0, study=None) for seed in (0, 1)),
    ]
    monkeypatch.setattr(studies, "read_rows", lambda bench: rows)
    scalerl, grpo, other = studies.study_table("rate", (32,)).splitlines()[2:]
    assert scalerl == "| 0.0001 | ScaleRL | 2 | 0.650 |  | 2.00% | 0.200 |"
    assert grpo.startswith("| 0.0001 | GRPO | 2 | 0.550 | **-0.100 ± ")
    assert other == "| 0.0002 | ScaleRL | 2 | 0.900 |  | 2.00% | 0.200 |"


def test_a_run_made_again_replaces_the_older_one() -> None:
    found = studies.read_study("rate", [run("grpo", 0, 1e-4, 0.2), run("grpo", 0, 1e-4, 0.4)])
    assert studies.at_step(found["grpo", 1e-4][0], 32) == 0.4
