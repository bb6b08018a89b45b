# SPDX-License-Identifier: Apache-2.0
"""The table of patches/README.md, from the diffs alone: their heads, their hunks and the tests they bring."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.markdown import table
from benchmarks.rows import REPO

PATCHES = REPO / "patches"


@dataclass(frozen=True)
class Patch:
    """One diff.

    Args:
        name: its file, below ``patches/``.
        base: upstream package and release that it applies to.
        status: where it stands upstream.
        subject: its title.
        changed: upstream file -> (lines added, lines removed); without the tests it brings.
        tests: files of tests that it brings.
    """

    name: str
    base: str
    status: str
    subject: str
    changed: dict[str, tuple[int, int]]
    tests: tuple[str, ...]


def read_patch(path: Path) -> Patch:
    """Read a diff.

    Raises:
        ValueError: its head lacks the subject, the base or the status.
    """
    text = path.read_text(encoding="utf-8")
    fields = {}
    for name, start in (("subject", "Subject"), ("base", "Base"), ("status", "Status")):
        found = re.search(rf"^{start}: (.+)$", text, re.MULTILINE)
        if found is None:
            raise ValueError(f"{path}: no line '{start}: ...' in its head (see patches/README.md)")
        fields[name] = found[1]
    counts: dict[str, tuple[int, int]] = {}
    current = ""
    for line in text.splitlines():
        if line.startswith("+++ b/"):
            current = line.removeprefix("+++ b/").split("\t")[0]
            counts[current] = (0, 0)
        elif current and line[:1] in "+-" and not line.startswith("---"):
            added, removed = counts[current]
            counts[current] = (added + line.startswith("+"), removed + line.startswith("-"))
    return Patch(
        name=f"{path.parent.name}/{path.name}",
        changed={name: count for name, count in counts.items() if not name.startswith("tests/")},
        tests=tuple(name for name in counts if name.startswith("tests/")),
        **fields,
    )


def patch_table() -> str:
    """One line a diff."""
    lines = []
    for patch in map(read_patch, sorted(PATCHES.glob("*/*.patch"))):
        added, removed = (sum(count[side] for count in patch.changed.values()) for side in (0, 1))
        tests = ", ".join(f"`{name}`" for name in patch.tests)
        what = re.sub(r"^\[.*?\] ?(\w+: )?", "", patch.subject)
        size = (len(patch.changed), f"+{added} -{removed}")
        lines.append((f"`{patch.name}`", patch.base, what, *size, tests, patch.status))
    return table(("patch", "upstream", "what", "files", "lines", "its own test", "status"), lines)
