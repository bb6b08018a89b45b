# SPDX-License-Identifier: Apache-2.0
"""Load a module of a recipe by its path: recipes are scripts beside each other, not packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

QUICKSTART = Path(__file__).resolve().parents[1] / "recipes" / "quickstart"
_SCRIPTS = tuple(path.stem for path in QUICKSTART.glob("*.py"))


def load_quickstart_module(name: str) -> ModuleType:
    """The quickstart's module ``name``, executed once a process.

    Scripts import each other by plain names, which are gone again afterwards, as is their folder on ``sys.path``.
    """
    known = _known_as(name)
    if known in sys.modules:
        return sys.modules[known]
    hidden = {script: sys.modules.pop(script) for script in _SCRIPTS if script in sys.modules}
    # One module for all that import it, so that its classes are the same.
    loaded = {script: sys.modules.get(_known_as(script)) for script in _SCRIPTS}
    sys.modules.update({script: module for script, module in loaded.items() if module is not None})
    sys.path.insert(0, str(QUICKSTART))
    try:
        spec = importlib.util.spec_from_file_location(known, QUICKSTART / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[known] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(QUICKSTART))
        for script in _SCRIPTS:
            if script in sys.modules:
                sys.modules.setdefault(_known_as(script), sys.modules.pop(script))
        sys.modules.update(hidden)


def _known_as(name: str) -> str:
    return f"quickstart_{name}"
