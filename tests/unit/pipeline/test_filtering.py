# SPDX-License-Identifier: Apache-2.0
"""When dynamic sampling has rejected too much, and what a config makes of it; what is rejected: test_buffer.py."""

from __future__ import annotations

import logging

import pytest
from omegaconf import OmegaConf

from scalerl_verl.errors import NoSignalError
from scalerl_verl.pipeline.filtering import WARN_BATCHES, GroupFilter, make_filter


def test_limit_is_that_of_one_batch_and_counts_what_can_train() -> None:
    groups = GroupFilter("reward", max_batches=2, batch_groups=4)
    groups.note({1.0: 3, -1.0: 1}, num_kept=3)
    assert groups.take() == {1.0: 3, -1.0: 1}
    groups.note({1.0: 4}, num_kept=3)
    with pytest.raises(NoSignalError, match=r"^5 prompt groups .*reward \(value: groups; 1: 4, -1: 1\)"):
        groups.note({-1.0: 1}, num_kept=3)


def test_full_batch_ends_no_run_however_many_were_rejected() -> None:
    groups = GroupFilter("reward", max_batches=1, batch_groups=2)
    groups.note({0.0: 50}, num_kept=2)
    assert groups.take() == {0.0: 50} and groups.take() == {}


@pytest.mark.parametrize("max_batches", [0, -1])
def test_run_without_a_limit_goes_on_and_says_so_once(max_batches: int, caplog: pytest.LogCaptureFixture) -> None:
    groups = GroupFilter("acc", max_batches, batch_groups=2)
    with caplog.at_level(logging.WARNING):
        for _ in range(3 * 2 * WARN_BATCHES):
            groups.note({0.0: 1}, num_kept=1)
    (record,) = caplog.records
    assert "max_num_gen_batches" in record.getMessage()


def test_filter_of_a_config() -> None:
    section = {"enable": True, "metric": "acc", "max_num_gen_batches": 3}
    config = OmegaConf.create({"data": {"train_batch_size": 5}, "algorithm": {"filter_groups": section}})
    made = make_filter(config)
    assert made is not None and made.metric == "acc"
    made.note({0.0: 14}, num_kept=0)
    with pytest.raises(NoSignalError, match="max_num_gen_batches=3 batches of 5 groups"):
        made.note({0.0: 1}, num_kept=0)
    config.algorithm.filter_groups.enable = False
    assert make_filter(config) is None
    assert make_filter(OmegaConf.create({"algorithm": {"filter_groups": None}})) is None
