# SPDX-License-Identifier: Apache-2.0
"""Load a module of a recipe or benchmark by its path: they are scripts beside each other, not packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

REPO = Path(__file__).resolve().parents[1]
QUICKSTART = REPO / "recipes" / "quickstart"
BENCHMARKS = REPO / "benchmarks"


def load_quickstart_module(name: str) -> ModuleType:
    """The quickstart's module ``name``, executed once a process."""
    return _load(QUICKSTART / f"{name}.py")


def load_benchmark_module(name: str) -> ModuleType:
    """The benchmarks' module ``name``, executed once a process."""
    return _load(BENCHMARKS / f"{name}.py")


def _load(path: Path) -> ModuleType:
    known = f"{path.parent.name}_{path.stem}"
    if known in sys.modules:
        return sys.modules[known]
    spec = importlib.util.spec_from_file_location(known, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[known] = module
    spec.loader.exec_module(module)
    return module
