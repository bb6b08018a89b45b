# SPDX-License-Identifier: Apache-2.0
"""How long requests of a pipeline run wait for a slot, and what a plan says about it."""

from __future__ import annotations

import json

import pytest

from scalerl_verl.cli import main
from scalerl_verl.planning.queueing import Queueing
from tests.unit.planning.test_command import RUN, plan

ONE_GENERATOR = (*RUN, "actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1")
TIMEOUT = "trainer.v1.pipeline_rl.request_timeout_s"


def test_wait_is_what_is_ahead_over_slots_times_a_response() -> None:
    queue = Queueing(requests=1280, slots=256, response_s=60, longest_s=300, request_timeout_s=3600)
    assert queue.wait_s == 4 * 60 and not list(queue.notes())
    assert Queueing(requests=100, slots=256, response_s=60, longest_s=300, request_timeout_s=3600).wait_s == 0


def test_queue_that_outlasts_the_time_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: all that admission sends waits on few engines, and every request times out in the queue."""
    code, found = plan(capsys, *ONE_GENERATOR, f"++{TIMEOUT}=600")
    queue = found["queue"]
    assert queue["requests"] == 768 * 9 and queue["wait_s"] > 600
    ahead = queue["requests"] - queue["slots"]
    assert queue["wait_s"] == pytest.approx(ahead / queue["slots"] * queue["response_s"])
    assert any("6,912 requests on an engine waits" in note and f"{TIMEOUT}=600" in note for note in found["notes"])
    assert main(["plan", *ONE_GENERATOR, f"++{TIMEOUT}=600"]) == code
    assert "note        the last of 6,912 requests" in capsys.readouterr().out


def test_response_that_outlasts_the_time_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = plan(capsys, *RUN, f"++{TIMEOUT}=5")
    assert any("begun again for nothing" in note for note in found["notes"])


def test_engines_enough_for_all_have_no_queue(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = plan(capsys, *RUN, "--mean-response", "2000")
    assert code == 0 and found["queue"]["requests"] == 108 and found["queue"]["wait_s"] == 0 and found["notes"] == []


def test_other_modes_send_nothing_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "+scalerl=recipe", *RUN[1:8], "trainer.nnodes=2", "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["queue"] is None
