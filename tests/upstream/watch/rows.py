# SPDX-License-Identifier: Apache-2.0
"""What was found, as rows: ``tests/upstream/works_with.jsonl``, from which the tables of the documents are made.

Three kinds of row: ``sources`` (a version that was looked at), ``patch`` (a diff on a version) and ``run`` (an
end-to-end run that took place). The first two are written by ``--record``, the last by hand.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any

from benchmarks.reference.works_with import ROWS
from scalerl_verl.json_lines import read_records
from tests.upstream.watch.compare import Findings
from tests.upstream.watch.patches import PatchOutcome

Row = dict[str, Any]


def rows_of(findings: Findings, outcomes: Sequence[PatchOutcome]) -> list[Row]:
    """The rows of one tree."""
    tree, today = findings.tree, datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    which = {"distribution": tree.distribution, "version": tree.version, "dated": tree.dated, "commit": tree.commit}
    sources = {
        "bound": findings.bound,
        "changed": sorted(change.name for change in findings.changed),
        "missing": sorted(findings.missing),
    }
    patches = [
        {"what": "patch", "patch": o.name, **which, "applies": o.applies, "test": o.test, "looked": today}
        for o in outcomes
    ]
    return [{"what": "sources", **which, **sources, "looked": today}, *patches]


def _key(row: Row) -> tuple[Any, ...]:
    return (row["what"], row.get("patch"), row.get("distribution"), row.get("version"), json.dumps(row.get("with")))


def merge(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """New rows in place of older ones about the same; runs stay, and what is not looked at again."""
    replaced = {_key(row) for row in new}
    kept = [row for row in old if row["what"] == "run" or _key(row) not in replaced]
    return sorted([*kept, *new], key=lambda row: json.dumps([row["what"], row.get("patch", ""), row], sort_keys=True))


def record(rows: Sequence[Row]) -> None:
    """Write rows into the file."""
    merged = merge(read_records(ROWS) if ROWS.exists() else [], rows)
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in merged), encoding="utf-8")


def recorded_releases() -> list[tuple[str, str]]:
    """Distribution and version of every release in the file."""
    rows = read_records(ROWS) if ROWS.exists() else []
    return [(row["distribution"], row["version"]) for row in rows if row["what"] == "sources" and not row["commit"]]
