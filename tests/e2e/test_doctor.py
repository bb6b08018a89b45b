# SPDX-License-Identifier: Apache-2.0
"""``scalerl doctor`` with the three processes that it starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def test_every_kind_of_process_loads_the_plugin_and_is_patched() -> None:
    command = [sys.executable, "-m", "scalerl_verl.cli", "doctor"]
    done = subprocess.run(
        command, env={**os.environ, "VERL_PLATFORM": "cpu"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    for title in ("driver", "Ray worker", "vLLM process"):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{title}:")]
        active, due = line.rsplit(" ", 1)[1].split("/")
        assert active == due != "0"
