# SPDX-License-Identifier: Apache-2.0
"""Trainer ranks as processes of their own: what drives verl's engine needs a process group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.paths import REPO


def run_ranks(program: Path, folder: Path, world_size: int, *also: Path) -> None:
    """Run ``program FOLDER`` once a rank, on the CPU and with our patches active; all must end well.

    Args:
        also: more folders to import from.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SCALERL_", "VERL_"))}
    environment |= {"VERL_PLATFORM": "cpu", "SCALERL_VERL_ACTIVE": "1", "WORLD_SIZE": str(world_size)}
    # A program may import from tests; a library's own package of that name must not come first.
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [*map(str, (REPO, *also)), environment.get("PYTHONPATH", "")])
    )
    logs = [folder / f"rank-{world_size}-{rank}.log" for rank in range(world_size)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(folder)],
            env=environment | {"RANK": str(rank)},
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [rank.wait(timeout=500) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0] * world_size, "\n".join(log.read_text()[-2000:] for log in logs)
