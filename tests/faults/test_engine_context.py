# SPDX-License-Identifier: Apache-2.0
"""An engine whose context is shorter than prompt and response: refused at start; a response that it cuts is seen."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from verl.utils.transferqueue_utils import KVBatchMeta
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.utils import get_max_position_embeddings

from scalerl_verl import engine_context as context
from scalerl_verl.advantage import length_step
from scalerl_verl.config.checks import find_problems
from scalerl_verl.interruption import verl as agent_loop
from scalerl_verl.interruption.budgets import InterruptionSettings, resolve_budgets
from scalerl_verl.interruption.markers import ThinkingScript
from scalerl_verl.interruption.response import RECORD_KEY
from scalerl_verl.interruption.verl import InterruptingClient
from tests.unit.composed import changed

ROLLOUT = "actor_rollout_ref.rollout"
LENGTHS = {f"{ROLLOUT}.prompt_length": 64, f"{ROLLOUT}.response_length": 192}
EOS = ord("$")
SETTINGS = InterruptionSettings(phrase="Stop. </think>", thinking_budget=(60, 60), answer_budget=8)


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


class ClampingEngine:
    """Does to ``max_tokens`` what verl's server does, on a scripted stream of tokens."""

    def __init__(self, text: str, room: int, reason: str = "completed") -> None:
        self.stream, self.room, self.reason = encode(text), room, reason
        self.asked: list[int] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        possible = self.room - len(prompt_ids)
        if possible < 1:
            raise ValueError(f"Prompt length ({len(prompt_ids)}) leaves no room to generate")
        self.asked.append(sampling_params["max_tokens"])
        tokens = self.stream[: max(1, min(sampling_params["max_tokens"], possible))]
        if EOS in tokens:
            tokens = tokens[: tokens.index(EOS) + 1]
        self.stream = self.stream[len(tokens) :]
        return TokenOutput(token_ids=tokens, log_probs=[0.0] * len(tokens), stop_reason=self.reason, extra_fields={})


def respond(engine: ClampingEngine, room: int | None) -> dict[str, Any]:
    """Record of a response to a prompt of 10 tokens, 90 tokens at most."""
    script = ThinkingScript(SETTINGS, encode, decode)
    budgets = resolve_budgets(SETTINGS, 90, len(script.phrase_ids), script.grace_tokens)
    client = InterruptingClient(
        engine, script, budgets, seed=0, session=0, step=0, stop_ids={EOS}, decode=decode, max_model_len=room
    )
    output = asyncio.run(client.generate("r", prompt_ids=encode("ab<think>"), sampling_params={"logprobs": True}))
    assert len(output.token_ids) == len(output.log_probs or [])
    record: dict[str, Any] = output.extra_fields[RECORD_KEY]
    return record


def test_thinking_that_the_engine_cuts_is_truncated_and_no_natural_end() -> None:
    record = respond(ClampingEngine("b" * 300, room=48), room=48)
    assert (record["outcome"], record["truncated"], record["clamped"]) == ("unclosed", True, True)
    assert record["thinking_tokens"] == 48 - len("ab<think>")


def test_reason_of_the_engine_counts_where_its_context_is_unknown() -> None:
    record = respond(ClampingEngine("b" * 300, room=48, reason="length"), room=None)
    assert record["truncated"] and record["clamped"]


@pytest.mark.parametrize("extra", [-3, 0, 1, 4])
def test_phrase_that_leaves_no_room_ends_the_response_instead_of_the_session(extra: int) -> None:
    """Prompt 9, thinking 60, phrase 14: the answer has ``extra`` tokens of its 8."""
    room = 9 + 60 + 14 + extra
    engine = ClampingEngine("b" * 300, room=room)
    record = respond(engine, room=room)
    assert (record["outcome"], record["truncated"], record["clamped"]) == ("interrupted", True, True)
    assert record["answer_tokens"] == max(extra, 0) and len(engine.asked) == (2 if extra > 0 else 1)


@pytest.mark.parametrize("room", [48, 120])
def test_natural_end_stays_one(room: int) -> None:
    record = respond(ClampingEngine("bb</think>42$", room=room), room=room)
    assert (record["outcome"], record["truncated"], record["clamped"]) == ("natural", False, False)


def test_end_of_turn_on_the_last_token_of_the_context_is_a_natural_end() -> None:
    text = "bb</think>42$"
    record = respond(ClampingEngine(text, room=9 + len(text)), room=9 + len(text))
    assert (record["truncated"], record["clamped"]) == (False, False)


def model_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **config}))
    return folder


@pytest.mark.parametrize("preset", ["recipe", "advantage"])
def test_model_with_a_shorter_context_is_refused_at_start(tmp_path: Path, preset: str) -> None:
    """Also for plain agent loops: whatever is cut there is not seen as cut."""
    folder = model_folder(tmp_path / "model", max_position_embeddings=255)
    config = changed(preset, {**LENGTHS, "actor_rollout_ref.model.path": str(folder)})
    (problem,) = context.find_model_problems(config)
    assert "max_position_embeddings=255" in problem and "= 256" in problem and f"{ROLLOUT}.max_model_len" in problem
    model_folder(tmp_path / "longer", max_position_embeddings=256)
    assert not list(
        context.find_model_problems(changed("", {**LENGTHS, "actor_rollout_ref.model.path": str(tmp_path / "longer")}))
    )


@pytest.mark.parametrize("key", ["max_model_len", "engine_kwargs.vllm.max_model_len"])
@pytest.mark.parametrize("preset", ["interruption", "advantage"])
def test_explicit_limit_is_refused_at_start(preset: str, key: str) -> None:
    changes = {**LENGTHS, f"{ROLLOUT}.{key}": 255}
    if preset == "advantage":
        changes[f"{ROLLOUT}.n"] = 4
    (problem,) = find_problems(changed(preset, changes))
    assert problem.startswith(f"{ROLLOUT}.{key}=255 is less than") and "256" in problem


def test_limit_above_the_model_s_positions_is_refused_before_verl_does(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", max_position_embeddings=200)
    changes = {**LENGTHS, "actor_rollout_ref.model.path": str(folder), f"{ROLLOUT}.max_model_len": 256}
    (problem,) = context.find_model_problems(changed("recipe", changes))
    assert "exceeds the model's max_position_embeddings=200" in problem
    changes["actor_rollout_ref.model.override_config.max_position_embeddings"] = 256
    assert not list(context.find_model_problems(changed("recipe", changes)))


@pytest.mark.parametrize(
    "content",
    [
        {"max_position_embeddings": 77},
        {"max_position_embeddings": 32, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"text_config": {"max_position_embeddings": 55}},
    ],
)
def test_positions_are_those_that_verl_takes(content: dict[str, Any]) -> None:
    parts = {key: SimpleNamespace(**value) if key == "text_config" else value for key, value in content.items()}
    assert context.model_positions(content) == get_max_position_embeddings(SimpleNamespace(**parts))


def test_model_that_is_nowhere_on_this_machine_is_left_to_the_engine() -> None:
    config = changed("recipe", {**LENGTHS, "actor_rollout_ref.model.path": "nobody/no-such-model"})
    assert list(context.find_model_problems(config)) == []


def test_worker_tells_the_loop_what_the_engine_holds() -> None:
    worker = SimpleNamespace(
        config=changed("interruption", {}),
        model_config=SimpleNamespace(generation_config=None, hf_config=SimpleNamespace(max_position_embeddings=48)),
    )
    with agent_loop.response_context(worker, {"validate": True}):
        found = agent_loop._context.get()
        assert found is not None and found.max_model_len == 48
    worker.config = changed("interruption", {f"{ROLLOUT}.max_model_len": 40})
    with agent_loop.response_context(worker, {"validate": True}):
        found = agent_loop._context.get()
        assert found is not None and found.max_model_len == 40


def test_cut_responses_of_plain_loops_are_counted_and_warned_about_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "_warned", set())
    config = changed("advantage", {"data.max_response_length": 192, f"{ROLLOUT}.max_model_len": 100})
    rows = [(40, 60), (10, 20), (30, 69)]  # prompt and response, tokens
    tags = [{"response_len": response, "seq_len": prompt + response} for prompt, response in rows]
    batch = KVBatchMeta(partition_id="train", keys=["a_0_0", "a_1_0", "b_0_0"], tags=tags)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            lengths = length_step.read_lengths(config, batch)
            assert lengths.truncated_R.tolist() == lengths.clamped_R.tolist() == [True, False, False]
    assert len(caplog.records) == 1 and f"{ROLLOUT}.max_model_len" in caplog.text and "100 tokens" in caplog.text
    metrics = length_step._summarize(
        lengths.truncated_R, lengths.clamped_R, lengths.prompt_ids, lengths.records, np.zeros(3)
    )
    assert metrics["truncated_fraction"] == metrics["clamped_fraction"] == pytest.approx(1 / 3)
