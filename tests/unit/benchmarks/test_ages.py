# SPDX-License-Identifier: Apache-2.0
"""Rows of the log-ratio by age: which steps count, and what docs/pipeline.md says of the recorded runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.pipeline.ages import BENCH, FIRST, draw, newest_of_each_lead, rows_of, squares_by_group
from benchmarks.rows import read_rows

NAME = "scalerl/mismatch/{}/log_ratio_square_mean"


def test_first_steps_count_for_the_engines_alone() -> None:
    steps = [{NAME.format("engines"): 1e-12, NAME.format("age_0"): 5.0}] * FIRST + [{NAME.format("age_10"): 2.0}] * 2
    squares = squares_by_group([*steps, {NAME.format("age_2"): 3.0, "other": 1.0}])
    assert squares == {"engines": [1e-12] * FIRST, "age_2": [3.0], "age_10": [2.0, 2.0]}
    assert list(squares) == ["engines", "age_2", "age_10"]
    rows = rows_of({"age_2": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}, "full", 60, {})
    assert [rows[0][name] for name in ("p20", "p50", "p80")] == [2.0, 3.5, 5.0]
    with pytest.raises(ValueError, match="give a log of pipeline_rl"):
        squares_by_group([{"other": 1.0}])


def test_recorded_runs_show_what_the_page_says(tmp_path: Path) -> None:
    runs = newest_of_each_lead(read_rows(BENCH))
    medians = {lead: {row["case"]["group_of_tokens"]: row["p50"] for row in rows} for lead, rows in runs.items()}
    for of_run in medians.values():
        assert of_run["engines"] < 1e-12 and round(of_run["age_5"], 2) == 0.03
    assert round(medians["full"]["age_7"], 2) == round(medians["full"]["age_8"], 2) == 0.07
    draw(runs, tmp_path / "ages.png")
    assert (tmp_path / "ages.png").stat().st_size > 0
