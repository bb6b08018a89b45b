# SPDX-License-Identifier: Apache-2.0
"""Load a module of a recipe by its path: recipes are scripts beside each other, not packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

QUICKSTART = Path(__file__).resolve().parents[1] / "recipes" / "quickstart"


def load_quickstart_module(name: str) -> ModuleType:
    """The quickstart's module ``name``, executed once a process."""
    known = f"quickstart_{name}"
    if known in sys.modules:
        return sys.modules[known]
    spec = importlib.util.spec_from_file_location(known, QUICKSTART / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[known] = module
    spec.loader.exec_module(module)
    return module
