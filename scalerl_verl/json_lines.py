# SPDX-License-Identifier: Apache-2.0
r"""JSON Lines: one JSON value a line, in UTF-8, cut at ``\n`` and at nothing else.

``str.splitlines`` also cuts at U+0085, U+2028 and others, which JSON leaves as they are inside a string.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def split_lines(text: str) -> list[str]:
    r"""Return the lines without their ends; blank ones stay, so that numbers of lines are right."""
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def read_records(path: Path) -> list[Any]:
    """Return the values of a file; a byte order mark and blank lines are left out.

    Raises:
        ValueError: a line is not JSON, or the file is not in UTF-8.
    """
    text = path.read_bytes().decode("utf-8-sig")
    return [json.loads(line) for line in split_lines(text) if line.strip()]
