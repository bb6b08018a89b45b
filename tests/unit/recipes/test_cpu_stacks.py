# SPDX-License-Identifier: Apache-2.0
"""Which CPU stack ``recipes/quickstart/env.sh`` installs, and where; nothing is installed here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
SHELL = ("env.sh", "interpreter.sh", "installer.sh")
FILES = (*SHELL, "requirements-cpu.txt", "requirements-cpu-0.28.txt", "requirements-cpu-0.32.txt")
SCRIPT = """
set -euo pipefail
source recipes/quickstart/env.sh
install_stack() { mkdir -p "$2"; echo "installs $2 from ${4##*/} and ${5##*/}"; }
ensure_env "$PWD"
echo "uses $SCALERL_VENV"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with all that the choice of a stack reads."""
    folder = tmp_path / "recipes" / "quickstart"
    folder.mkdir(parents=True)
    for name in FILES:
        shutil.copy(REPO / "recipes" / "quickstart" / name, folder)
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(REPO / name, tmp_path)
    return tmp_path


def choose(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    others = {name: value for name, value in os.environ.items() if name != "SCALERL_STACK"}
    command = ["bash", "-c", SCRIPT]
    return subprocess.run(command, cwd=checkout, env={**others, **environment}, capture_output=True, text=True)


def test_default_stack_goes_to_the_ordinary_folder(checkout: Path) -> None:
    done = choose(checkout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"installs {checkout}/.venv from requirements-cpu.txt and requirements-cpu-0.32.txt",
        f"uses {checkout}/.venv",
    ]
    assert choose(checkout, SCALERL_STACK="").stdout.splitlines()[-1] == f"uses {checkout}/.venv"


def test_other_stack_goes_to_a_folder_of_its_own(checkout: Path) -> None:
    done = choose(checkout, SCALERL_STACK="0.28")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"installs {checkout}/.venv-0.28 from requirements-cpu.txt and requirements-cpu-0.28.txt",
        f"uses {checkout}/.venv-0.28",
    ]


@pytest.mark.parametrize("stack", ["0.31", "0.32.0", "../0.32"])
def test_unknown_stack_is_refused_with_those_that_there_are(checkout: Path, stack: str) -> None:
    done = choose(checkout, SCALERL_STACK=stack)
    assert done.returncode == 1
    assert f"SCALERL_STACK={stack}" in done.stderr and done.stderr.rstrip().endswith("there are: 0.28 0.32")
    assert done.stdout == ""
