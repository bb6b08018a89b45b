# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: cells of tables get a width that their text can be read in; site.css has the widths."""

from __future__ import annotations

import html
import re
from typing import Any

_CELL = re.compile(r"<td((?: [^>]*)?)>(.*?)</td>", re.DOTALL)
_CODE = re.compile(r"<code>([^<]*)</code>")
LONG_CODE = 60
"""Letters from which code in a cell is a command, which breaks between its words. A name never breaks."""


def on_page_content(content: str, **_: Any) -> str:
    """The page with its cells marked."""
    return _CELL.sub(lambda match: f"<td{match[1]}{_width(match[2])}>{_CODE.sub(_mark, match[2])}</td>", content)


def _width(cell: str) -> str:
    letters = len(html.unescape(re.sub(r"<[^>]*>", "", cell)))
    return ' data-text="long"' if letters > 90 else ' data-text="some"' if letters > 28 else ""


def _mark(match: re.Match[str]) -> str:
    return f'<code data-text="command">{match[1]}</code>' if len(html.unescape(match[1])) > LONG_CODE else match[0]
