# SPDX-License-Identifier: Apache-2.0
"""The bound is checked on every batch, and the metrics say how stale it is."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl_verl.errors import StalenessError
from scalerl_verl.pipeline.batch import measure_batch

PREFIX = "scalerl/pipeline"


def test_metrics_count_tokens_and_sequences_by_age() -> None:
    rows = [([(3, 4), (5, 6)], 10), ([(5, 2)], 2), ([], 0)]
    metrics = measure_batch(rows, version=5, max_staleness=3, reissues=[1, 0, 2])
    assert metrics[f"{PREFIX}/staleness_max"] == 2
    assert metrics[f"{PREFIX}/staleness_mean"] == pytest.approx(4 * 2 / 12)
    assert [metrics[f"{PREFIX}/staleness_tokens/{age}_sum"] for age in range(4)] == [8, 0, 4, 0]
    assert [metrics[f"{PREFIX}/staleness_sequences/{age}_sum"] for age in range(4)] == [1, 0, 1, 0]
    assert metrics[f"{PREFIX}/versions_per_sequence_mean"] == 1.5
    assert metrics[f"{PREFIX}/versions_per_sequence_max"] == 2
    assert metrics[f"{PREFIX}/requests_reissued_sum"] == 3


def test_rows_of_lists_are_runs_too() -> None:
    """Ray and TransferQueue turn tuples into lists."""
    assert measure_batch([([[4, 3]], 3)], 4, 0)[f"{PREFIX}/staleness_max"] == 0


@pytest.mark.fault("groups of mixed versions are trained although that was ruled out")
@pytest.mark.parametrize(
    ("runs", "count", "message"),
    [
        ([(1, 5)], 5, "tokens 0 to 3 versions old"),
        ([(5, 5)], 5, "tokens -1 to 0 versions old"),
        ([(4, 4)], 5, "5 sampled tokens, but versions were recorded for 4"),
        (None, 5, "recorded for None"),
        ([(4, 1)], 0, "0 sampled tokens"),
    ],
)
def test_batch_that_breaks_the_bound_is_refused(runs: Any, count: int, message: str) -> None:
    with pytest.raises(StalenessError, match=message):
        measure_batch([([(4, 1)], 1), (runs, count)], version=4, max_staleness=2)


@pytest.mark.fault("a staleness bound of 0 or 1 that is off by one")
def test_k_0_takes_tokens_of_this_very_version_only() -> None:
    measure_batch([([(7, 3)], 3)], version=7, max_staleness=0)
    with pytest.raises(StalenessError, match="1 to 1 versions old"):
        measure_batch([([(6, 3)], 3)], version=7, max_staleness=0)


@pytest.mark.fault("groups of mixed versions are trained although that was ruled out")
def test_group_of_mixed_versions_trains_within_the_bound_only() -> None:
    """Fault: groups of mixed versions are trained although that was ruled out (k = 0 rules it out).

    One response of the group began and ended under version 3, one spans 3 and 4, one is of version 4.
    """
    group = [([[3, 5]], 5), ([[3, 2], [4, 1]], 3), ([[4, 6]], 6)]
    assert measure_batch(group, version=4, max_staleness=1)["scalerl/pipeline/staleness_sequences/1_sum"] == 2
    for rows in (group, group[1:], group[:1]):
        with pytest.raises(StalenessError, match=r"tokens [01] to 1 versions old"):
            measure_batch(rows, version=4, max_staleness=0)
