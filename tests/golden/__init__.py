# SPDX-License-Identifier: Apache-2.0
"""What the package does, recorded as text, to compare before and after a refactoring (see `__main__`)."""

from __future__ import annotations

import re

from tests.paths import REPO

_MOVES = {
    re.escape(str(REPO)): "<repo>",
    # Of a dotted path of ours the class stays: users name no other part.
    r"\bscalerl_verl(\.[a-z_]\w*)+": "<ours>",
    r"\bscalerl_verl(/\w+)*/\w+\.py\b": "<ours>.py",
    # pytest numbers folders in the order in which a worker asks for them.
    r"/tmp/pytest-of-\w+/pytest-\d+(/popen-gw\d+)?/[\w-]*?\d+\b": "<tmp>",
    r"(?<=port=)\d{4,}|\d+(?= \(python\))|\bu0r\d+|\b[0-9a-f]{32}\b|\b0x[0-9a-f]{6,}": "<id>",
}


def normalise(text: str) -> str:
    """The text without what may differ: folders, our own modules' names, random ids."""
    for pattern, replacement in _MOVES.items():
        text = re.sub(pattern, replacement, text)
    return text
