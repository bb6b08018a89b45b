# SPDX-License-Identifier: Apache-2.0
"""A user's tool, as ``rollout.multi_turn.function_tool_path`` loads it."""

from verl.tools.function_tool import function_tool


@function_tool("add")
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: a number.
        b: another one.
    """
    return str(a + b)
