# SPDX-License-Identifier: Apache-2.0
"""An agent loop's error reaches the prompt's row; TransferQueue is a stub here that records what is put."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from omegaconf import OmegaConf

from scalerl_verl.pipeline import failures
from scalerl_verl.verl import agent_worker


class StubQueue:
    def __init__(self) -> None:
        self.puts: list[tuple[str, str, dict[str, Any]]] = []

    async def async_kv_put(self, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        self.puts.append((key, partition_id, tag))


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> StubQueue:
    stub = StubQueue()
    monkeypatch.setattr(failures, "tq", stub)
    return stub


def run_failing_loop(monkeypatch: pytest.MonkeyPatch, mode: str, validate: bool) -> None:
    """Our method in front of one of verl's that raises."""
    from contextlib import nullcontext

    class Worker:
        config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": mode}}})

        async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> None:
            raise KeyError("chat\ntemplate")

    class Ours(agent_worker.AgentWorkerMixin, Worker):
        pass

    monkeypatch.setattr(agent_worker, "response_context", lambda *_: nullcontext())
    with pytest.raises(KeyError):
        asyncio.run(Ours()._run_agent_loop({}, {"validate": validate}, agent_name="single_turn_agent", uid="g7"))


def test_error_is_noted_at_the_prompt_and_still_raised(queue: StubQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    run_failing_loop(monkeypatch, "pipeline_rl", validate=False)
    assert queue.puts == [("g7", "train", {failures.ERROR_TAG: "KeyError: 'chat\\ntemplate'"})]


@pytest.mark.parametrize(("mode", "validate"), [("pipeline_rl", True), ("sync", False)])
def test_validation_and_other_modes_are_left_alone(
    mode: str, validate: bool, queue: StubQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_failing_loop(monkeypatch, mode, validate)
    assert queue.puts == []


def test_long_errors_are_cut_to_one_line() -> None:
    text = failures.describe(ValueError("a\nb " + "x" * 2000))
    assert text.startswith("ValueError: a b x") and len(text) < failures.MAX_CHARACTERS + 10
