# SPDX-License-Identifier: Apache-2.0
"""Strikes of generators that cannot be reached, over verl's load balancer."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl_verl.cpu.vllm_alias import install_vllm_alias

install_vllm_alias()

from scalerl_verl.errors import NoGeneratorError  # noqa: E402
from scalerl_verl.pipeline import balancer as module  # noqa: E402
from scalerl_verl.pipeline.balancer import PipelineBalancer  # noqa: E402
from scalerl_verl.pipeline.failures import LONGEST_PAUSE_S, strike_pause_s  # noqa: E402


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def make_balancer(*names: str) -> Any:
    return PipelineBalancer(servers={name: f"handle of {name}" for name in names}, max_cache_size=100)


def test_server_out_of_reach_is_spared_although_it_has_the_fewest_requests(clock: Clock) -> None:
    balancer = make_balancer("a", "b")
    assert balancer.report_unreachable("a", 3) == 0.0, "b takes it at once"
    assert {balancer.acquire_server(f"r{i}") for i in range(5)} == {("b", "handle of b")}
    assert balancer.get_status()["servers"] == {"a": 0, "b": 5} and balancer.get_all_servers().count("a") == 1
    clock.now = strike_pause_s(1) + 0.1
    assert balancer.acquire_server("later")[0] == "a"


def test_conversation_on_a_server_out_of_reach_goes_to_another(clock: Clock) -> None:
    balancer = make_balancer("a", "b")
    first = balancer.acquire_server("talk")[0]
    balancer.report_unreachable(first, 3)
    assert balancer.acquire_server("talk")[0] != first


def test_failures_of_one_moment_are_one_strike(clock: Clock) -> None:
    """Fault: a passing network fault takes a generator out of the run for good."""
    balancer = make_balancer("a", "b")
    for _ in range(500):
        balancer.report_unreachable("a", 2)
    assert sorted(balancer.get_all_servers()) == ["a", "b"]


def test_strikes_in_a_row_remove_a_server_and_an_answer_clears_them(clock: Clock) -> None:
    balancer = make_balancer("a", "b")

    def strike() -> None:
        clock.now += LONGEST_PAUSE_S + 1
        balancer.report_unreachable("a", 3)

    strike(), strike()
    balancer.report_reached("a")
    strike(), strike()
    assert "a" in balancer.get_all_servers()
    strike()
    assert balancer.get_all_servers() == ["b"]
    balancer.add_servers({"a": "handle of a"})
    strike()
    assert "a" in balancer.get_all_servers(), "what comes back comes without strikes"


def test_only_server_is_waited_for(clock: Clock) -> None:
    balancer = make_balancer("a")
    assert balancer.report_unreachable("a", 3) == strike_pause_s(1)
    clock.now = 4.0
    assert balancer.report_unreachable("a", 3) == strike_pause_s(1) - 4.0, "the same strike"
    assert balancer.acquire_server("r")[0] == "a", "a request that cannot wait has no other"


def test_unknown_server_and_the_last_one_removed_need_no_wait(clock: Clock) -> None:
    balancer = make_balancer("a")
    assert balancer.report_unreachable("gone", 3) == 0.0
    assert balancer.report_unreachable("a", 1) == 0.0
    with pytest.raises(NoGeneratorError, match="no generator takes requests"):
        balancer.acquire_server("r")


def test_pauses_double_up_to_a_limit() -> None:
    assert [strike_pause_s(strikes) for strikes in (1, 2, 3, 4, 5, 50)] == [10, 20, 40, 80, 120, 120]
