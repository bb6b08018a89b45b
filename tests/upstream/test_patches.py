# SPDX-License-Identifier: Apache-2.0
"""The diffs in patches/ apply to the installed upstream sources, pass their own tests, and are in the table.

A diff for another release than the installed one cannot be applied here: its form is checked. Where that release is
installed (a GPU host), this file does everything with it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

from scalerl_verl.upstream.spec import installed_version

REPO = Path(__file__).resolve().parents[2]
PATCHES = sorted((REPO / "patches").glob("*/*.patch"))
TABLE = (REPO / "patches" / "README.md").read_text()


def _base_version(patch: Path) -> str:
    """The upstream release that the table says a diff applies to."""
    found = re.search(rf"^\| `{patch.parent.name}/{patch.name}` \| {patch.parent.name} (\S+) \|", TABLE, re.MULTILINE)
    assert found, f"{patch.name} is not in patches/README.md with its base"
    return found[1]


def _has_base(patch: Path) -> bool:
    version = installed_version(patch.parent.name)
    return version is not None and Version(version).public == _base_version(patch)


def _new_names(patch: Path) -> list[str]:
    return [line.split()[1].removeprefix("b/") for line in patch.read_text().splitlines() if line.startswith("+++ b/")]


def _patched_files(patch: Path) -> list[str]:
    return [name for name in _new_names(patch) if not name.startswith("tests/")]


def _own_tests(patch: Path) -> list[str]:
    return [name for name in _new_names(patch) if name.startswith("tests/")]


WITH_TESTS = [patch for patch in PATCHES if _own_tests(patch)]
HERE = [patch for patch in PATCHES if _has_base(patch)]
"""Diffs whose base is installed."""


def _site(patch: Path) -> Path:
    spec = importlib.util.find_spec(patch.parent.name)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]).parent


def _apply(patch: Path, folder: Path, *options: str) -> None:
    done = subprocess.run(["git", "apply", "-v", *options, str(patch)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("patch", HERE, ids=lambda path: path.stem)
def test_patch_applies_and_compiles(patch: Path, tmp_path: Path) -> None:
    names = _patched_files(patch)
    assert names
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_site(patch) / name, tmp_path / name)
    before = [(tmp_path / name).read_text() for name in names]
    _apply(patch, tmp_path)
    for name, old in zip(names, before, strict=True):
        new = (tmp_path / name).read_text()
        assert new != old
        if name.endswith(".py"):
            compile(new, name, "exec")
        else:
            yaml.safe_load(new)


def _run_own_tests(patch: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """The diff's tests on the copy of upstream in ``folder``, in a process without our plugin."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SCALERL_", "VERL_"))}
    environment |= {"PYTHONPATH": str(folder), "VERL_USE_EXTERNAL_PLUGINS": "none"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_own_tests(patch)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("patch", [patch for patch in WITH_TESTS if patch in HERE], ids=lambda path: path.stem)
def test_patch_passes_its_own_tests_which_fail_without_it(patch: Path, tmp_path: Path) -> None:
    package = patch.parent.name
    shutil.copytree(_site(patch) / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    _apply(patch, tmp_path, "--include=tests/*")
    without = _run_own_tests(patch, tmp_path)
    assert without.returncode in (1, 2), without.stdout[-2000:] + without.stderr[-2000:]
    _apply(patch, tmp_path, "--exclude=tests/*")
    done = _run_own_tests(patch, tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


@pytest.mark.parametrize("patch", WITH_TESTS, ids=lambda path: path.stem)
def test_patch_tells_maintainers_symptom_cause_and_change(patch: Path) -> None:
    head = patch.read_text().split("\n---\n")[0]
    starts = ["Subject: [", "\nSymptom: ", "\nCause: ", "\nChange: ", "\nTest: pytest tests/"]
    places = [head.find(start) for start in starts]
    assert places == sorted(places) and places[0] == 0 and -1 not in places
    assert all(name in head for name in _own_tests(patch))


def test_only_diffs_of_another_vllm_are_left_out_here() -> None:
    """verl's version is pinned by this project; a diff of it that names another base would be dead."""
    assert {patch.parent.name for patch in PATCHES if patch not in HERE} <= {"vllm"}


def test_diff_for_another_release_is_well_formed(tmp_path: Path) -> None:
    """The counts of all hunks hold, and the new files in it are Python."""
    for patch in (patch for patch in PATCHES if patch not in HERE):
        done = subprocess.run(["git", "apply", "--numstat", str(patch)], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == len(_new_names(patch))
        assert _patched_files(patch) and _own_tests(patch)
        _apply(patch, tmp_path, "--include=tests/*")
        for name in _own_tests(patch):
            compile((tmp_path / name).read_text(), name, "exec")


def test_every_patch_is_listed() -> None:
    assert PATCHES and WITH_TESTS
    assert [path for path in PATCHES if f"{path.parent.name}/{path.name}" not in TABLE] == []
