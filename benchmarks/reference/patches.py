# SPDX-License-Identifier: Apache-2.0
"""The table of patches/README.md, from the diffs alone: their heads, their hunks and the tests they bring."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.markdown import table
from benchmarks.reference import works_with
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


def applies_elsewhere(patch: Patch) -> str:
    """Whether a diff applies to the newest sources it was tried on beside its base, and what they are."""
    upstream, _, base = patch.base.partition(" ")
    tried = [row for row in works_with.read_kind("patch") if row["patch"] == patch.name]
    others = [row for row in tried if row["version"] != base]
    if not others:
        return "not tried"
    row = max(others, key=lambda row: row["dated"])
    based = [other["dated"] for other in tried if other["version"] == base and other["distribution"] == upstream]
    test = {"passed": ", its test passes", "failed": ", its test fails"}.get(row["test"], "")
    older = f", older than {base}" if any(row["dated"] < dated for dated in based) else ""
    verdict = f"yes{test}" if row["applies"] else "no"
    name = "main" if row["version"] == "main" else works_with.name_of(row)
    return f"{verdict} ({name} of {row['dated']}{older})"


def patch_table() -> str:
    """One line a diff."""
    lines = []
    for patch in map(read_patch, sorted(PATCHES.glob("*/*.patch"))):
        added, removed = (sum(count[side] for count in patch.changed.values()) for side in (0, 1))
        tests = ", ".join(f"`{name}`" for name in patch.tests)
        what = re.sub(r"^\[.*?\] ?(\w+: )?", "", patch.subject)
        size = (len(patch.changed), f"+{added} -{removed}")
        elsewhere = applies_elsewhere(patch)
        lines.append((f"`{patch.name}`", patch.base, what, *size, tests, elsewhere, patch.status))
    heads = (
        "patch",
        "upstream",
        "what",
        "files",
        "lines",
        "its own test",
        "applies to main, or the newest release",
        "status",
    )
    return table(heads, lines)
