# SPDX-License-Identifier: Apache-2.0
"""When the wanted metric is not there, the answer says what is."""

from __future__ import annotations

import pytest

from scalerl_verl.scaling.logs.metric_names import MAX_LISTED, find_score, list_names
from scalerl_verl.scaling.logs.segments import ReadError, RunLog


def make_run(*names: str) -> RunLog:
    return RunLog("r", {1: dict.fromkeys(names, 0.5)})


def test_log_without_a_score_lists_likely_scores_first_and_counts_the_others() -> None:
    names = [f"actor/thing_{i:02d}" for i in range(30)] + ["eval/accuracy", "critic/score/mean"]
    with pytest.raises(ReadError, match="has no score by a name that is known") as error:
        find_score(make_run(*names), None)
    assert "trainer.test_freq" in str(error.value), "which is verl's"
    listed = str(error.value).split("It has ")[1]
    assert listed.startswith("eval/accuracy, critic/score/mean, actor/thing_00")
    assert listed.endswith(f"and {32 - MAX_LISTED} more") and listed.count(",") == MAX_LISTED - 1


def test_log_of_another_trainer_is_not_told_of_settings_of_verl() -> None:
    with pytest.raises(ReadError, match=r"with --y\. It has eval_accuracy, loss") as error:
        find_score(make_run("loss", "eval_accuracy"), None)
    assert "trainer." not in str(error.value)


def test_name_that_is_not_there_lists_the_nearest_first() -> None:
    with pytest.raises(
        ReadError, match=r"has no metric eval/acuracy; did you mean eval/accuracy\? It has eval/accuracy"
    ):
        find_score(make_run("loss", "eval/accuracy", "lr"), "eval/acuracy")


def test_part_that_fits_several_lists_them() -> None:
    with pytest.raises(ReadError, match="--y acc fits 2 metrics of r: "):
        find_score(make_run("a/acc", "b/acc", "loss"), "acc")


def test_run_without_metrics_says_so() -> None:
    assert list_names([]) == "no metric at all"


@pytest.mark.parametrize("name", ["val-core/math/acc/mean@4", "val-core/math/acc/mean_at_4"])
def test_score_of_verl_is_found_as_every_tracker_writes_it(name: str) -> None:
    assert find_score(make_run("loss", "val-core/math/acc/std@4", "val-aux/math/len/mean@4", name), None) == name
