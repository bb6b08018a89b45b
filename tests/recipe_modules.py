# SPDX-License-Identifier: Apache-2.0
"""Scripts of recipes/, which is no package, loaded for tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

REPO = Path(__file__).resolve().parents[1]
RECIPES = REPO / "recipes"
QUICKSTART = RECIPES / "quickstart"


def load_quickstart_module(name: str) -> ModuleType:
    """The quickstart's module ``name``, executed once a process."""
    return _load(QUICKSTART, name)


def load_recipe_module(recipe: str, name: str) -> ModuleType:
    """The module ``name`` of a recipe's folder, executed once a process."""
    return _load(RECIPES / recipe, name)


def _load(folder: Path, name: str) -> ModuleType:
    """A script of ``folder``.

    Scripts import each other by plain names, which are gone again afterwards, as is their folder on ``sys.path``.
    """
    known = f"{folder.name}_{name}"
    if known in sys.modules:
        return sys.modules[known]
    scripts = {path.stem: f"{folder.name}_{path.stem}" for path in folder.glob("*.py")}
    hidden = {script: sys.modules.pop(script) for script in scripts if script in sys.modules}
    # One module for all that import it, so that its classes are the same.
    loaded = {script: sys.modules.get(as_known) for script, as_known in scripts.items()}
    sys.modules.update({script: module for script, module in loaded.items() if module is not None})
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location(known, folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[known] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(folder))
        for script, as_known in scripts.items():
            if script in sys.modules:
                sys.modules.setdefault(as_known, sys.modules.pop(script))
        sys.modules.update(hidden)
