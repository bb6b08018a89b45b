# SPDX-License-Identifier: Apache-2.0
"""Generated parts of README.md, docs/ and patches/ are those of the recorded rows, the code and the diffs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scalerl_verl.json_lines import read_records
from tests.unit.docs.test_commands import ENTRIES, PAGES

REPO = Path(__file__).resolve().parents[2]
HASH = re.compile(r"`(?=\d*[a-f])([0-9a-f]{7,40})`")
"""In Markdown, and not a number."""


def test_generated_parts_are_up_to_date() -> None:
    command = [sys.executable, str(REPO / "benchmarks" / "report.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_commits_that_are_cited_are_in_the_history() -> None:
    """A row or a page whose commit was rewritten later names sources that nobody can look up."""
    git = ["git", "-C", str(REPO)]
    ask = [*git, "rev-parse", "--is-shallow-repository"]
    if not shutil.which("git") or subprocess.run(ask, capture_output=True, text=True).stdout.strip() != "false":
        pytest.skip("no git repository, or not its whole history")
    cited = {found for page in PAGES.find_pages() for found in HASH.findall(page.read_text())}
    for path in (REPO / "benchmarks" / "results").glob("*.jsonl"):
        rows = read_records(path)
        cited |= {row["commit"] for row in rows if "commit" in row}
    runs = [entry.get(kind) for entry in ENTRIES.values() for kind in ("gpu", "by_hand")]
    cited |= {str(run["commit"]) for run in runs if isinstance(run, dict)}
    assert len(cited) > 10
    known = subprocess.run([*git, "rev-list", "HEAD"], capture_output=True, text=True, check=True).stdout.split()
    assert sorted(commit for commit in cited if not any(one.startswith(commit) for one in known)) == []
