# SPDX-License-Identifier: Apache-2.0
"""Versions per token as run lengths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_verl.pipeline.versions import (
    VersionLog,
    count_by_age,
    join_runs,
    merge_runs,
    oldest_version,
    truncate_runs,
)


@pytest.mark.fault("a request that spans versions carries one version")
@given(st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=12))
def test_log_gives_every_token_the_version_it_was_sampled_under(script: list[list[bool]]) -> None:
    """One list of booleans between two updates: True samples a token for request a, False for request b."""
    log, truth = VersionLog(3), {"a": [], "b": []}
    log.begin("a")
    log.begin("b")
    for version, samples in enumerate(script, start=3):
        for is_a in samples:
            truth["a" if is_a else "b"].append(version)
        log.update(version + 1, {name: len(tokens) for name, tokens in truth.items()})
    for name, tokens in truth.items():
        runs = log.end(name, len(tokens))
        assert [version for version, count in runs for _ in range(count)] == tokens
    assert not log._runs


def test_request_that_finished_before_an_update_keeps_its_version() -> None:
    """The engine has finished it, but its result has not arrived yet when two updates pass."""
    log = VersionLog(0)
    log.begin("done")
    log.begin("open")
    log.update(1, {"open": 2})
    log.update(2, {"open": 5})
    assert log.end("done", 7) == [(0, 7)]
    assert log.end("open", 6) == [(0, 2), (1, 3), (2, 1)]


def test_request_that_lost_tokens_is_an_error() -> None:
    log = VersionLog(0)
    log.begin("a")
    log.update(1, {"a": 5})
    with pytest.raises(ValueError, match="lost 2 tokens"):
        log.update(2, {"a": 3})
    with pytest.raises(ValueError, match="cannot be negative"):
        log.end("a", 4)


def test_weights_only_get_newer() -> None:
    with pytest.raises(ValueError, match="only get newer"):
        VersionLog(4).update(4, {})
    with pytest.raises(ValueError, match="only get newer"):
        join_runs([(2, 1)], [(1, 1)])
    with pytest.raises(ValueError, match="only get newer"):
        join_runs([(2, 1)], [(1, 0)])
    with pytest.raises(ValueError, match="cannot be negative"):
        join_runs([(2, -1)])


def test_merging_takes_versions_as_they_come_and_joining_gives_the_same_where_they_rise() -> None:
    assert merge_runs([[2, 1], [2, 0]], [[1, 0]], [[2, 3], [1, 4]]) == [(2, 4), (1, 4)]
    assert merge_runs() == merge_runs([], [(3, 0)]) == []
    parts = ([(1, 2), (2, 3)], [(2, 0), (2, 4)], [(5, 1)])
    assert merge_runs(*parts) == join_runs(*parts) == join_runs(*(iter(part) for part in parts))


def test_dropped_request_is_forgotten() -> None:
    log = VersionLog(0)
    log.begin("a")
    log.drop("a")
    assert not log._runs


def test_pieces_of_a_response_are_joined() -> None:
    assert join_runs([(1, 2), (2, 3)], [(2, 4), (5, 1)]) == [(1, 2), (2, 7), (5, 1)]
    assert join_runs([], [(1, 0)]) == []


def test_truncation_keeps_the_first_tokens() -> None:
    assert truncate_runs([(1, 2), (2, 3), (3, 1)], 4) == [(1, 2), (2, 2)]
    assert truncate_runs([(1, 2)], 9) == [(1, 2)]


def test_ages_and_oldest_version() -> None:
    runs = [(1, 2), (3, 5)]
    assert oldest_version(runs) == 1
    assert count_by_age(runs, 4) == {3: 2, 1: 5}
    with pytest.raises(ValueError, match="no version"):
        oldest_version([])
