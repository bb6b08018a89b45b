# SPDX-License-Identifier: Apache-2.0
"""The diffs in patches/ apply to the installed upstream sources, and the table lists each of them."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PATCHES = sorted((REPO / "patches").glob("*/*.patch"))


def _patched_files(patch: Path) -> list[str]:
    return [line.split()[1].removeprefix("b/") for line in patch.read_text().splitlines() if line.startswith("+++ ")]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_patch_applies_and_compiles(patch: Path, tmp_path: Path) -> None:
    spec = importlib.util.find_spec(patch.parent.name)
    assert spec is not None and spec.submodule_search_locations
    site = Path(spec.submodule_search_locations[0]).parent
    names = _patched_files(patch)
    assert names
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(site / name, tmp_path / name)
    before = [(tmp_path / name).read_text() for name in names]
    done = subprocess.run(["git", "apply", "-v", str(patch)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, old in zip(names, before, strict=True):
        new = (tmp_path / name).read_text()
        assert new != old
        compile(new, name, "exec")


def test_every_patch_is_listed() -> None:
    table = (REPO / "patches" / "README.md").read_text()
    assert PATCHES
    assert [path for path in PATCHES if f"{path.parent.name}/{path.name}" not in table] == []
