# SPDX-License-Identifier: Apache-2.0
"""Which diffs of patches/ apply to a tree, and whether they pass their own tests there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.reference.patches import PATCHES, read_patch
from tests.upstream.patch_copies import run_in_copies
from tests.upstream.watch.trees import Tree

Test = Literal["passed", "failed", "not run"]
_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")


@dataclass(frozen=True)
class PatchOutcome:
    """A diff on a tree.

    Args:
        name: its file, below ``patches/``.
        applies: without an edit.
        test: of its own tests on the patched tree.
        detail: why it does not apply, or the end of a failed test's output.
    """

    name: str
    applies: bool
    test: Test = "not run"
    detail: str = ""


def try_patches(tree: Tree, scratch: Path, run_tests: bool) -> list[PatchOutcome]:
    """Apply every diff of the tree's package to a copy of its own, and run the tests that it brings.

    Those of vLLM are not run, sources lack the compiled code: ``tests/upstream/test_patches.py`` runs them where
    the release is installed.
    """
    files = sorted((PATCHES / tree.package).glob("*.patch"))
    outcomes = {path: _apply(path, tree, scratch / path.stem) for path in files}
    if run_tests and tree.package == "verl":
        applied = [path for path, outcome in outcomes.items() if outcome.applies]
        for path, (code, output) in zip(applied, _run_tests(applied, scratch), strict=True):
            passed = code == 0 and " passed" in output
            detail = "" if passed else "\n".join(output.strip().splitlines()[-3:])
            outcomes[path] = PatchOutcome(outcomes[path].name, True, "passed" if passed else "failed", detail)
    return list(outcomes.values())


def _apply(path: Path, tree: Tree, copy: Path) -> PatchOutcome:
    """Patch a copy of the package, in which its tests can run."""
    name = f"{path.parent.name}/{path.name}"
    shutil.copytree(tree.folder / tree.package, copy / tree.package, ignore=_IGNORED)
    # A repository around the scratch folder must not be taken for the patched one's.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent)}
    command = ["git", "apply", "-v", str(path)]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    errors = re.findall(r"^error: (patch failed: .*|.*: No such file.*)$", done.stderr, re.MULTILINE)
    return PatchOutcome(
        name, done.returncode == 0, detail="; ".join(errors[:1] + [f"{len(errors) - 1} more"] * (len(errors) > 1))
    )


def _run_tests(files: list[Path], scratch: Path) -> list[tuple[int, str]]:
    """Exit code and output of each diff's own tests, without our plugin."""
    if not files:
        return []
    jobs = [(scratch / path.stem, read_patch(path).tests) for path in files]
    try:
        return run_in_copies(jobs, scratch)
    except RuntimeError as error:
        return [(1, str(error))] * len(files)
