# SPDX-License-Identifier: Apache-2.0
"""A user's agent loop: verl's ``tool_agent`` for a model that cannot write a tool call."""

from __future__ import annotations

import json
from typing import Any

from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser


def with_tools(template: str) -> str:
    """The quickstart's chat template that also shows what a tool returns, which verl renders behind a system's word."""
    branch = (
        "{%- elif message['role'] == 'tool' -%}{{- '<|user|>=' + message['content'] -}}"
        "{%- elif message['role'] == 'system' -%}{{- message['content'] -}}"
    )
    changed = template.replace("{%- else -%}", branch + "{%- else -%}", 1)
    assert changed != template
    return changed


@ToolParser.register("counting")
class CountingParser(ToolParser):
    """Takes every response for a call: add its characters and its digits."""

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        numbers = {"a": len(text), "b": sum(letter.isdigit() for letter in text)}
        return text, [FunctionCall(name="add", arguments=json.dumps(numbers))]


class CalculatorLoop(ToolAgentLoop):
    """Loaded by ``agent_loop_config_path``, as loops of users are; with it comes the parser."""
