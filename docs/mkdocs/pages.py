# SPDX-License-Identifier: Apache-2.0
"""The commands that the pages show, for the test that wants each of them accounted for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def find_pages(repo: Path = REPO) -> list[Path]:
    """Every Markdown file a reader is sent to."""
    return [
        repo / "README.md",
        repo / "patches" / "README.md",
        repo / "tests" / "gpu" / "README.md",
        repo / "docs" / "package" / "description.md",
        *sorted((repo / "docs").glob("*.md")),
        *sorted((repo / "recipes").glob("*/README.md")),
    ]


def find_commands(text: str) -> Iterator[str]:
    """Commands of the fenced shell blocks: continued lines joined, comments and ``;`` between commands taken away."""
    for block in _BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"(^|\s)#\s.*$", "", line)
            # Commands on one line are separated by two blanks, so that a `;` within quotes stays.
            for command in line.split(";  "):
                shown = " ".join(command.split())
                if shown:
                    yield shown
