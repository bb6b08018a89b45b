# SPDX-License-Identifier: Apache-2.0
"""The diffs in patches/ apply to the sources they name, and the table lists each of them.

A diff against another version than the installed one cannot be applied here: its form is checked, and where its base is
installed (a GPU host) this file applies it.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

from scalerl_verl.upstream.spec import installed_version

REPO = Path(__file__).resolve().parents[2]
PATCHES = sorted((REPO / "patches").glob("*/*.patch"))
TABLE = (REPO / "patches" / "README.md").read_text()


def base_version(patch: Path) -> str:
    """The upstream release that the table says a diff applies to."""
    found = re.search(rf"^\| `{patch.parent.name}/{patch.name}` \| {patch.parent.name} (\S+) \|", TABLE, re.MULTILINE)
    assert found, f"{patch.name} is not in patches/README.md with its base"
    return found[1]


def has_base(patch: Path) -> bool:
    """Whether the release that a diff applies to is installed."""
    version = installed_version(patch.parent.name)
    return version is not None and Version(version).public == base_version(patch)


def _old_and_new_names(patch: Path) -> list[tuple[str, str]]:
    """Files before and after; ``/dev/null`` before for a new one."""
    lines = [line.split()[1] for line in patch.read_text().splitlines() if line.startswith(("--- ", "+++ "))]
    names = [line.removeprefix("a/").removeprefix("b/") for line in lines]
    return list(zip(names[::2], names[1::2], strict=True))


def check_patch_applies(patch: Path, folder: Path) -> None:
    """Apply a diff to copies of the installed files and compile what comes out."""
    spec = importlib.util.find_spec(patch.parent.name)
    assert spec is not None and spec.submodule_search_locations
    site = Path(spec.submodule_search_locations[0]).parent
    names = _old_and_new_names(patch)
    assert names
    before = {}
    for old, new in names:
        if old == "/dev/null":
            continue
        (folder / new).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(site / old, folder / new)
        before[new] = (folder / new).read_text()
    done = subprocess.run(["git", "apply", "-v", str(patch)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for _, name in names:
        new = (folder / name).read_text()
        assert new != before.get(name)
        compile(new, name, "exec")


@pytest.mark.parametrize("patch", [patch for patch in PATCHES if has_base(patch)], ids=lambda path: path.stem)
def test_patch_applies_and_compiles(patch: Path, tmp_path: Path) -> None:
    check_patch_applies(patch, tmp_path)


@pytest.mark.parametrize("patch", [patch for patch in PATCHES if not has_base(patch)], ids=lambda path: path.stem)
def test_patch_for_another_release_is_well_formed(patch: Path, tmp_path: Path) -> None:
    """What it adds parses as far as it can be known: counts of its hunks, and whole new files."""
    done = subprocess.run(["git", "apply", "--numstat", str(patch)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(_old_and_new_names(patch))
    new_files = [new for old, new in _old_and_new_names(patch) if old == "/dev/null"]
    assert new_files, "a diff brings its own test"
    command = ["git", "apply", *(f"--include={name}" for name in new_files), str(patch)]
    subprocess.run(command, cwd=tmp_path, check=True)
    for name in new_files:
        compile((tmp_path / name).read_text(), name, "exec")


def test_every_patch_of_the_installed_verl_was_applied() -> None:
    """verl is pinned: none of its diffs may slip into the weaker test."""
    assert [patch for patch in PATCHES if patch.parent.name == "verl" and not has_base(patch)] == []


def test_every_patch_is_listed() -> None:
    assert PATCHES
    assert [path for path in PATCHES if f"{path.parent.name}/{path.name}" not in TABLE] == []
