# SPDX-License-Identifier: Apache-2.0
"""How often a dead generator is launched again; launches are stubs (a run: tests/faults/test_pipeline_faults.py)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from scalerl_verl.cpu.vllm_alias import install_vllm_alias

install_vllm_alias()

from scalerl_verl.pipeline import failures  # noqa: E402
from scalerl_verl.pipeline.relaunching import Relauncher  # noqa: E402

DEAD = SimpleNamespace(replica_rank=4)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "FIRST_PAUSE_S", 0.0)


class Launch:
    """Each try does what the next entry says: an error that it raises, or what is up then."""

    def __init__(self, *script: Any) -> None:
        self.script, self.door, self.seen = list(script), threading.Event(), list[Any]()

    def __call__(self, replica: Any) -> Any:
        self.seen.append(replica)
        self.door.wait()
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def take(relauncher: Relauncher) -> list[Any]:
    return wait_until(lambda: not relauncher._threads[4].is_alive()) and relauncher.take_launched()


def wait_until(holds: Callable[[], bool]) -> bool:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < 30
        time.sleep(0.005)
    return True


def test_launch_holds_nobody_up_and_is_tried_again() -> None:
    launch = Launch(ValueError("no memory"), "a generator")
    relauncher = Relauncher(launch, 3)
    relauncher.start(DEAD)
    relauncher.start(DEAD)
    assert relauncher.num_under_way == 1 and relauncher.take_launched() == []
    launch.door.set()
    assert take(relauncher) == ["a generator"] and relauncher.num_under_way == 0
    assert relauncher.take_launched() == [] and launch.seen == [DEAD, DEAD]


def test_tries_are_counted_over_the_whole_run(caplog: pytest.LogCaptureFixture) -> None:
    """One that comes up and dies again would be launched for ever."""
    launch = Launch("first", ValueError("no memory"), "third")
    launch.door.set()
    relauncher = Relauncher(launch, 2)
    relauncher.start(DEAD)
    assert take(relauncher) == ["first"]
    with caplog.at_level(logging.WARNING):
        relauncher.start(DEAD)
        assert take(relauncher) == []
        relauncher.start(DEAD)
    assert relauncher.num_under_way == 0 and launch.script == ["third"]
    assert "launching generator 4 failed: ValueError: no memory" in caplog.text
    assert "not launched again: trainer.v1.pipeline_rl.max_relaunches=2" in caplog.text


def test_none_is_launched_if_none_may_be() -> None:
    launch = Launch()
    relauncher = Relauncher(launch, 0)
    relauncher.start(DEAD)
    assert relauncher.num_under_way == 0 and launch.seen == []
