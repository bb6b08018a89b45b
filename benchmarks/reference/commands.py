# SPDX-License-Identifier: Apache-2.0
"""The table of docs/commands.md, from docs/mkdocs/commands.yaml."""

from __future__ import annotations

import html
from typing import Any

import yaml

from benchmarks.markdown import table
from benchmarks.rows import REPO

REGISTRY = REPO / "docs" / "mkdocs" / "commands.yaml"


def run_text(run: Any) -> str:
    """A run on a GPU or by hand in a cell."""
    return run if isinstance(run, str) else f"{run['date']}, `{run['commit']}`: {run['result']}"


def command_table() -> str:
    """One line a command."""
    lines = []
    for entry in yaml.safe_load(REGISTRY.read_text(encoding="utf-8")):
        command = f"`{entry['command'].strip()}`"
        if "|" in command:  # a table's cell ends there, and an escape would show in code
            command = f"<code>{html.escape(command.strip('`')).replace('|', '&#124;')}</code>"
        test = f"`{entry['executed']}`" if "executed" in entry else ""
        if "how" in entry:
            test += f" ({entry['how']})"
        runs = "; ".join(
            f"{kind}: {run_text(entry[key])}" for key, kind in (("gpu", "GPU"), ("by_hand", "by hand")) if key in entry
        )
        lines.append((command, test, runs))
    return table(("command", "executed by", "by hand, or on a GPU"), lines)
