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
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

from scalerl_verl.upstream.spec import installed_version
from tests.upstream.patch_copies import run_in_copies

REPO = Path(__file__).resolve().parents[2]
PATCHES = sorted((REPO / "patches").glob("*/*.patch"))


def _base_version(patch: Path) -> str:
    """The upstream release that a diff says it applies to."""
    found = re.search(rf"^Base: {patch.parent.name} (\S+)$", patch.read_text(), re.MULTILINE)
    assert found, f"{patch.name} does not say its base"
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


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str]]]:
    """Patch -> (exit code, output) of its own tests on copies of upstream without and with it, without our plugin."""
    folder = tmp_path_factory.mktemp("copies")
    jobs = []
    for number, patch in enumerate(HERE):
        package = patch.parent.name
        for which, options in (("without", ["--include=tests/*"]), ("with", [])):
            copy = folder / f"{number}-{which}"
            shutil.copytree(_site(patch) / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
            _apply(patch, copy, *options)
            jobs.append((copy, _own_tests(patch)))
    results = run_in_copies(jobs, folder, timeout_s=600)
    return {str(patch): results[2 * number : 2 * number + 2] for number, patch in enumerate(HERE)}


@pytest.mark.parametrize("patch", HERE, ids=lambda path: path.stem)
@pytest.mark.timeout(700)
def test_patch_passes_its_own_tests_which_fail_without_it(
    patch: Path, outcomes: dict[str, list[tuple[int, str]]]
) -> None:
    (without, before), (with_it, after) = outcomes[str(patch)]
    assert without in (1, 2) and ("failed" in before or "error" in before), before[-3000:]
    assert with_it == 0 and " passed" in after, after[-3000:]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_patch_tells_maintainers_symptom_cause_change_test_and_cost(patch: Path) -> None:
    head = patch.read_text().split("\n---\n")[0]
    starts = ["Subject: [", "\nSymptom: ", "\nCause: ", "\nChange: ", "\nTest: pytest tests/", "\nCost: "]
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


def test_every_patch_brings_its_test_and_is_in_both_tables() -> None:
    """That the tables are current, benchmarks/report.py --check says."""
    assert {patch.parent.name for patch in PATCHES} == {"verl", "vllm"}
    for page in ("patches/README.md", "docs/upstream-a-patch.md"):
        text = (REPO / page).read_text()
        assert [path for path in PATCHES if f"| `{path.parent.name}/{path.name}` |" not in text] == []
    for patch in PATCHES:
        assert _patched_files(patch) and len(_own_tests(patch)) == 1, patch.name
        assert re.search(r"^Status: \S", patch.read_text(), re.MULTILINE)


def test_commit_is_what_the_page_says(tmp_path: Path) -> None:
    """The commands of docs/upstream-a-patch.md, in a repository with the files of the first diff."""
    patch = next(path for path in PATCHES if _has_base(path))
    page = (REPO / "docs" / "upstream-a-patch.md").read_text()
    (block,) = (block for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "git apply" in block)
    for name in _patched_files(patch):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_site(patch) / name, tmp_path / name)
    person = {f"GIT_{role}_{what}": "a@example.org" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    script = "set -e\ngit init -q .\ngit add -A\ngit commit -qm base\n" + block
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, **person, "PATCH": str(patch)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    shown = subprocess.run(
        ["git", "log", "-1", "--format=%B", "--name-only"], cwd=tmp_path, capture_output=True, text=True
    )
    subject = patch.read_text().splitlines()[0].removeprefix("Subject: ")
    lines = shown.stdout.splitlines()
    assert lines[0] == subject and "Status:" not in shown.stdout and "Signed-off-by: a@example.org" in shown.stdout
    assert sorted(_new_names(patch)) == sorted(
        line for line in lines if line.endswith((".py", ".yaml")) and " " not in line
    )
