# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.upstream.verl_suite [--state STATE ...] [PART ...]``: verl's own tests.

verl's wheel ships its tests. They run in a copy, one file a process, in each state: ``without`` (verl loads no plugin),
``installed`` (loaded as in any run; none of our names is used) and ``active`` (all is patched that a run with our
names patches). A test whose outcome differs from ``without`` is printed, and the exit code is 1. Files whose path holds
one of the PARTs, or all: half an hour for each state on two cores. Tests that want a GPU or the network fail in every
state and say nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from importlib import metadata
from pathlib import Path

STATES: dict[str, dict[str, str]] = {
    "without": {"VERL_USE_EXTERNAL_PLUGINS": "none", "VLLM_PLUGINS": ""},
    "installed": {},
    "active": {"SCALERL_VERL_ACTIVE": "1"},
}
TIMEOUT_S = 600


def copy_tests(folder: Path) -> list[Path]:
    """Copy the tests of verl's wheel to ``folder``; the test files, relative to it."""
    found = []
    for file in metadata.files("verl") or ():
        if file.parts[0] != "tests" or "__pycache__" in file.parts:
            continue
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(str(file.locate()), target)
        if file.name.startswith("test_"):
            found.append(Path(file))
    return sorted(found)


def run_file(folder: Path, file: Path, more: dict[str, str]) -> dict[str, str]:
    """Test -> ``passed``, ``failed`` (errors too), ``skipped`` or ``timed out``, for one file."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    unwanted = ("VERL_USE_EXTERNAL_PLUGINS", "VLLM_PLUGINS", "SCALERL_VERL_ACTIVE", "VERL_PLATFORM")
    environment = {key: value for key, value in os.environ.items() if key not in unwanted}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", str(file)]
    try:
        subprocess.run(
            [*command, f"--junitxml={report}", f"--rootdir={folder}"], cwd=folder, env={**environment, **more},
            capture_output=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {str(file): "timed out"}
    if not report.exists():
        return {str(file): "failed"}
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        outcomes[f"{file}::{case.get('name')}"] = outcome
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", action="append", choices=STATES, help="default: all; without is always among them")
    parser.add_argument("parts", nargs="*")
    arguments = parser.parse_args()
    states = [name for name in STATES if name == "without" or name in (arguments.state or STATES)]
    differences = []
    totals: dict[str, dict[str, int]] = {name: {} for name in states}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = [
            f for f in copy_tests(folder) if not arguments.parts or any(part in str(f) for part in arguments.parts)
        ]
        for file in files:
            began = time.monotonic()
            outcomes = {state: run_file(folder, file, STATES[state]) for state in states}
            for state, found in outcomes.items():
                for outcome in found.values():
                    totals[state][outcome] = totals[state].get(outcome, 0) + 1
            tests = dict.fromkeys(test for found in outcomes.values() for test in found)
            new = [
                f"{test}: {', '.join(f'{state} {found.get(test)}' for state, found in outcomes.items())}"
                for test in tests
                if len({found.get(test) for found in outcomes.values()}) > 1
            ]
            differences += new
            print(f"{file} {time.monotonic() - began:.0f} s, {len(tests)} tests", *new, sep="\n  DIFFERS ", flush=True)
    for state, counts in totals.items():
        print(state, ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    print(f"{len(differences)} differences")
    return int(bool(differences) or not files)


if __name__ == "__main__":
    sys.exit(main())
