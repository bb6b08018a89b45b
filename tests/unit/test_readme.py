# SPDX-License-Identifier: Apache-2.0
"""Generated parts of README.md, docs/ and patches/ are those of the recorded rows, the code and the diffs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def test_generated_parts_are_up_to_date() -> None:
    command = [sys.executable, str(REPO / "benchmarks" / "report.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_files_named_in_the_readme_exist() -> None:
    text = (REPO / "README.md").read_text()
    for name in (
        "recipes/quickstart/run.sh",
        "tests/run.sh",
        "docs/quickstart.png",
        "docs/baselines.md",
        "docs/scaling.md",
        "docs/planning.md",
        "recipes/ablation/sweep.py",
        "benchmarks/bench_quickstart.py",
        "docs/reference.md",
        "docs/troubleshooting.md",
    ):
        assert name in text
        assert (REPO / name).is_file(), name
