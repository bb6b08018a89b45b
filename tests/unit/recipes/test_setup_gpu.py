# SPDX-License-Identifier: Apache-2.0
"""``recipes/common/setup_gpu.sh`` on stand-ins of the driver and of uv: what it refuses, installs, and tries next."""

from __future__ import annotations

import os
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from tests.paths import RECIPES

SCRIPT = RECIPES / "common" / "setup_gpu.sh"
NVIDIA_SMI = '#!/bin/sh\n[ -n "$DRIVER" ] && echo "$DRIVER"\n'
# Makes a venv of two programs that only say what they are called with; has no wheel where $NO_WHEEL says so.
UV = """#!/bin/sh
echo "uv $*" >> "$CALLS"
case "$*" in
  --version) ;;
  venv*) for last; do :; done; mkdir -p "$last/bin"
    for name in python scalerl; do printf '#!/bin/sh\\necho "%s $*" >> "$CALLS"\\n' "$name" > "$last/bin/$name"
      chmod +x "$last/bin/$name"; done ;;
  *--only-binary*) [ -z "$NO_WHEEL" ] ;;
  *--no-build-isolation*) [ -z "$NO_NVCC" ] ;;
esac
"""


@pytest.fixture
def host(tmp_path: Path) -> dict[str, str]:
    """Environment of a host with a fitting driver."""
    for name, text in (("nvidia-smi", NVIDIA_SMI), ("uv", UV)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    unset = ("PYTHON", "SCALERL_INSTALLER", "FLASH_ATTN_INDEX")
    kept = {key: value for key, value in os.environ.items() if key not in unset}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return kept | {"PATH": path, "CALLS": str(tmp_path / "calls"), "DRIVER": "580.159.04"}


def set_up(host: dict[str, str], *options: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    done = subprocess.run(["bash", str(SCRIPT), *options], env=host, capture_output=True, text=True)
    calls = Path(host["CALLS"])
    return done, calls.read_text().splitlines() if calls.exists() else []


def test_installs_pins_then_the_wheel_and_looks(host: dict[str, str], tmp_path: Path) -> None:
    done, calls = set_up(host, str(tmp_path / "venv"))
    assert done.returncode == 0, done.stderr
    installs = [call for call in calls if call.startswith("uv pip install")]
    assert len(installs) == 2
    assert "-r recipes/common/pins-gpu.txt" in installs[0] and installs[0].endswith(f"-e {RECIPES.parent}[gpu]")
    assert "--only-binary flash-attn" in installs[1] and "verl-wheelhouse" in installs[1]
    assert calls[-1] == "scalerl doctor" and "import flash_attn" in calls[-2]


def test_builds_where_there_is_no_wheel(host: dict[str, str], tmp_path: Path) -> None:
    done, calls = set_up({**host, "NO_WHEEL": "1"}, str(tmp_path / "venv"))
    assert done.returncode == 0, done.stderr
    assert any("--no-build-isolation flash-attn==" in call for call in calls) and calls[-1] == "scalerl doctor"


def test_says_what_to_set_where_it_cannot_be_built(host: dict[str, str], tmp_path: Path) -> None:
    done, calls = set_up({**host, "NO_WHEEL": "1", "NO_NVCC": "1"}, str(tmp_path / "venv"))
    assert done.returncode == 1 and "use_remove_padding=False" in done.stderr
    assert "scalerl doctor" not in calls


@pytest.mark.parametrize(("driver", "said"), [("", "shows no GPU"), ("570.86.10", "580 or newer")])
def test_host_without_a_fitting_driver_is_refused(host: dict[str, str], tmp_path: Path, driver: str, said: str) -> None:
    done, calls = set_up({**host, "DRIVER": driver}, str(tmp_path / "venv"))
    assert done.returncode == 1 and said in done.stderr
    assert calls == [] and not (tmp_path / "venv").exists()


def test_print_starts_nothing(host: dict[str, str], tmp_path: Path) -> None:
    done, calls = set_up({**host, "DRIVER": ""}, "--print", str(tmp_path / "venv"))
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 4, done.stderr
    assert calls == [] and not (tmp_path / "venv").exists()


def test_flash_attn_is_the_one_that_verl_pins() -> None:
    (wanted,) = re.findall(r"^flash_attn=(.*)$", SCRIPT.read_text(), re.MULTILINE)
    assert wanted in {line.split(";")[0].strip() for line in metadata.requires("verl") or []}
