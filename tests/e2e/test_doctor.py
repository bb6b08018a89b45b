# SPDX-License-Identifier: Apache-2.0
"""The wheel in a bare verl environment by the commands of docs/release.md, and the processes that the doctor starts."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.paths import REPO
from tests.unit.docs.test_commands import PAGES
from tests.unit.test_release import copy_sources

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
BEGIN, END = "python -m build --no-isolation", "outputs/bare/bin/scalerl doctor"


def _link_stack(folder: Path) -> Path:
    """Links to all that is installed here but us, in a folder that can stand for ``site-packages``."""
    folder.mkdir()
    for key in ("purelib", "platlib"):
        for path in Path(sysconfig.get_path(key)).iterdir():
            link = folder / path.name
            if "scalerl" not in path.name and not link.exists():
                link.symlink_to(path)
    return folder


def test_wheel_in_a_bare_environment_is_loaded_and_patched_in_every_kind_of_process(tmp_path: Path) -> None:
    commands = list(PAGES.find_commands((REPO / "docs" / "release.md").read_text()))
    commands = commands[commands.index(BEGIN) : commands.index(END) + 1]
    assert len(commands) == 5
    script = "\n".join(commands).replace("python3.11", f"python{sys.version_info.major}.{sys.version_info.minor}")
    source = copy_sources(tmp_path / "source")
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RAY_ADDRESS")}
    environment = kept | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "VERL_SITE_PACKAGES": str(_link_stack(tmp_path / "site-packages")),
        "VERL_PLATFORM": "cpu",
    }
    done = subprocess.run(
        ["bash", "-ec", script], cwd=source, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert list((source / "outputs" / "bare").glob("lib/*/site-packages/scalerl_verl/py.typed"))
    for title in ("driver", "Ray worker", "vLLM process"):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{title}:")]
        active, due = line.rsplit(" ", 1)[1].split("/")
        assert active == due != "0"
