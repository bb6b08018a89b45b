# SPDX-License-Identifier: Apache-2.0
"""Versions of a response that was sampled in several requests, put together over its response mask.

verl's own ``tool_agent`` runs with a calculator; the generator is a script, behind the client's note.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from recipes.quickstart import model as quickstart_model
from scalerl_verl.errors import StalenessError
from scalerl_verl.pipeline.turns import Call, collecting_calls, find_continued, join_calls, note_call, note_versions
from tests.e2e.probe.scalerl_test_calculator import with_tools

SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "a + b",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "integer", "description": name} for name in "ab"},
            "required": ["a", "b"],
        },
    },
}
TURN = '<tool_call>{"name":"add","arguments":{"a":7,"b":5}}</tool_call>'


class Generator:
    """Says one text after the other; half of each is of one version, the rest of the next."""

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        self.tokenizer, self.texts, self.asked = tokenizer, texts, list[str]()
        self.continued: list[tuple[int, int] | None] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        ids = self.tokenizer.encode(self.texts[len(self.asked)] + self.tokenizer.eos_token, add_special_tokens=False)
        turn, half = len(self.asked), len(ids) // 2
        self.asked.append(self.tokenizer.decode(prompt_ids))
        self.continued.append(find_continued(prompt_ids))
        extra = {"versions": [[turn, half], [turn + 1, len(ids) - half]], "reissues": turn, "prefix_version": 0}
        output = TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason="completed", extra_fields=extra)
        note_call(prompt_ids, output)
        return output


def run_tool_agent(texts: list[str], response_length: int = 200) -> tuple[AgentLoopOutput, Generator]:
    """Of verl, with an adder."""
    tokenizer = quickstart_model.build_tokenizer()
    tokenizer.chat_template = with_tools(tokenizer.chat_template)
    turns = {
        "max_user_turns": None, "max_assistant_turns": 3, "max_parallel_calls": 1, "format": "hermes",
        "max_tool_response_length": 256, "tool_response_truncate_side": "middle",
    }  # fmt: skip
    rollout = {"prompt_length": 16, "response_length": response_length, "full_determinism": False, "multi_turn": turns}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    generator = Generator(tokenizer, texts)

    async def run() -> AgentLoopOutput:
        loop = ToolAgentLoop(
            trainer_config=DictConfigWrap(config),
            server_manager=generator,
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(config.data),
            hf_model_type="qwen3",
            tools=ToolListWrap([FunctionTool("add", lambda a, b: str(a + b), OpenAIFunctionToolSchema(**SCHEMA))]),
        )
        params = {"temperature": 1.0, "logprobs": True}
        return await loop.run(params, raw_prompt=[{"role": "user", "content": "7+5"}])

    with collecting_calls():
        output = asyncio.run(run())
        note_versions([output])
    return output, generator


@pytest.mark.fault("a request that spans versions carries one version")
def test_tool_agent_of_verl_has_the_versions_of_every_turn() -> None:
    output, generator = run_tool_agent([TURN, TURN, "12"])
    assert len(generator.asked) == 3 and generator.asked[2].count("<|user|>=12") == 2, "the tool was called"
    size = len(TURN) + 1  # a token a character, and the end of the turn
    assert output.extra_fields["versions"] == [
        [0, size // 2], [1, size - size // 2 + size // 2], [2, size - size // 2 + 1], [3, 2],
    ]  # fmt: skip
    assert sum(output.response_mask) == 2 * size + 3 < len(output.response_mask)
    assert output.extra_fields["reissues"] == 0 + 1 + 2
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (0, 3)


def test_turn_after_a_tool_asks_for_the_prefix_that_the_turn_before_has_computed() -> None:
    output, generator = run_tool_agent([TURN, TURN, "12"])
    turn = len(TURN) + 1
    between = output.response_mask.count(0) // 2
    computed = [len(output.prompt_ids) + turn - 1, len(output.prompt_ids) + turn + between + turn - 1]
    assert generator.continued == [None, (0, computed[0]), (0, computed[1])]


def test_turn_that_the_loop_cuts_off_counts_as_far_as_it_goes() -> None:
    size = len(TURN) + 1
    output, _ = run_tool_agent([TURN, TURN, "12"], response_length=size + 30)
    runs = output.extra_fields["versions"]
    assert sum(count for _, count in runs) == sum(output.response_mask) < len(output.response_mask) == size + 30
    assert [version for version, _ in runs] == [0, 1], "half of the second turn is of version 1"


def test_attempts_that_a_loop_drops_do_not_count() -> None:
    """Two answers to one prompt, of which it keeps the second; a later answer that it does not return at all."""
    calls = [Call([1, 2], [7, 7, 9], [(0, 3)]), Call([1, 2], [7, 8], [(1, 2)]), Call([1, 2, 7, 8, 5], [6], [(2, 1)])]
    assert join_calls([1, 2], [7, 8], [1, 1], calls) == [(1, 2)]
    assert join_calls([1, 2], [7, 8, 5, 6], [1, 1, 0, 1], calls) == [(1, 2), (2, 1)]


def test_equal_answers_are_told_by_what_was_asked() -> None:
    calls = [Call([1, 7, 7], [7], [(2, 1)]), Call([1], [7], [(0, 1)]), Call([1, 7], [7], [(1, 1)])]
    assert join_calls([1], [7, 7, 7], [1, 1, 1], calls) == [(0, 1), (1, 1), (2, 1)]


def test_loop_that_leaves_out_older_turns_is_told_by_its_tokens() -> None:
    calls = [Call([1], [7, 8], [(0, 2)]), Call([1, 5], [6, 4], [(1, 2)])]
    assert join_calls([1], [7, 8, 5, 6], [1, 1, 0, 1], calls) == [(0, 2), (1, 1)]


@pytest.mark.parametrize("response", [[7, 8, 3], [3]], ids=["behind an answer", "from the start"])
def test_token_that_nobody_sampled_is_an_error(response: list[int]) -> None:
    with pytest.raises(
        StalenessError, match=r"to be trained .* none of the 2 that the generator sampled .* 1 requests"
    ):
        join_calls([1], response, [1] * len(response), [Call([1], [7, 8], [(0, 2)])])


def test_response_without_a_sampled_token_has_no_versions() -> None:
    assert join_calls([1], [], [], []) == join_calls([1], [2, 3], [0, 0], [Call([1], [9], [(0, 1)])]) == []
