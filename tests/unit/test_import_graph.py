# SPDX-License-Identifier: Apache-2.0
"""What the package may import where, so that it stays light to load and its algorithms can be lifted out."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import scalerl_verl

PACKAGE = Path(scalerl_verl.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
ALGORITHMS = ("losses", "advantages", "curriculum", "scaling", "head", "rollout")
ALLOWED = {"numpy", "scipy", "torch"}
KERNELS = {"head/rows_triton.py": {"triton"}}
"""Modules that are written in another language's package, imported only where they run."""
MAX_LINES = 600
HEAVY = ("torch", "verl", "vllm", "ray", "numpy", "transformers", "hydra", "omegaconf")


def module_id(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def is_algorithm(path: Path) -> bool:
    return path.relative_to(PACKAGE).parts[0] in ALGORITHMS


def imports_of(path: Path) -> set[str]:
    """Absolute names of everything a module imports anywhere, those inside functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} line {node.lineno}: relative imports hide what is imported"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("module", ["scalerl_verl", "scalerl_verl.upstream.table", "scalerl_verl.cli"])
def test_light_module_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("path", [path for path in MODULES if is_algorithm(path)], ids=module_id)
def test_algorithm_imports_numerics_and_algorithms_only(path: Path) -> None:
    for name in imports_of(path):
        top, *rest = name.split(".")
        own = top == "scalerl_verl" and rest and rest[0] in (*ALGORITHMS, "names")
        allowed = ALLOWED | KERNELS.get(module_id(path), set())
        assert own or top in allowed or top in sys.stdlib_module_names, f"{module_id(path)} imports {name}"


def test_algorithm_packages_are_found() -> None:
    folders = {path.relative_to(PACKAGE).parts[0] for path in MODULES if is_algorithm(path)}
    assert {"losses", "advantages", "curriculum", "scaling"} <= folders


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_module_is_short_enough_to_be_read(path: Path) -> None:
    assert len(path.read_text().splitlines()) < MAX_LINES


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_module_starts_with_its_licence(path: Path) -> None:
    assert path.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")
