# SPDX-License-Identifier: Apache-2.0
"""Attempts and ages of groups."""

from __future__ import annotations

from scalerl_verl.pipeline.groups import GroupWatch


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_group_is_stuck_after_the_time_out_and_not_before() -> None:
    clock = Clock()
    watch = GroupWatch(max_attempts=2, timeout_s=10.0, clock=clock)
    assert watch.find_stuck(["a"]) == set()
    clock.now = 10.0
    assert watch.find_stuck(["a", "b"]) == set()
    clock.now = 10.1
    assert watch.find_stuck(["a", "b"]) == {"a"}


def test_group_is_tried_as_often_as_allowed_under_whatever_name() -> None:
    watch = GroupWatch(max_attempts=3, timeout_s=1.0)
    name = "first"
    for number in range(2):
        assert watch.sort_failed([name]) == ([name], [])
        watch.renew(name, f"again-{number}")
        name = f"again-{number}"
    assert watch.sort_failed([name, "other"]) == (["other"], [name])
    assert watch.sort_failed([name]) == ([name], []), "a group that was given up is forgotten"


def test_new_attempt_and_new_life_start_a_new_clock() -> None:
    clock = Clock()
    watch = GroupWatch(max_attempts=3, timeout_s=10.0, clock=clock)
    watch.find_stuck(["a", "b"])
    clock.now = 11.0
    watch.renew("a", "a2")
    watch.forget(["b"])
    assert watch.find_stuck(["a2", "b"]) == set()
