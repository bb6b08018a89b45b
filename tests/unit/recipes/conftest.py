# SPDX-License-Identifier: Apache-2.0
"""Loads the modules of a recipe, which are scripts beside each other and not a package, by their path."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart"
SIBLINGS = ("task", "model")  # imported by plain name in prepare.py, as scripts do


def load_by_path(name: str, module_name: str) -> ModuleType:
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, QUICKSTART / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def quickstart():
    """Return a function from a module name of the quickstart to the module."""

    def load(name: str) -> ModuleType:
        if name != "prepare":
            return load_by_path(name, f"quickstart_{name}")
        # One `task` for both, so that the classes are the same; the plain names are gone again afterwards.
        hidden = {sibling: sys.modules.pop(sibling, None) for sibling in SIBLINGS}
        for sibling in SIBLINGS:
            sys.modules[sibling] = load_by_path(sibling, f"quickstart_{sibling}")
        try:
            return load_by_path(name, "quickstart_prepare")
        finally:
            for sibling, module in hidden.items():
                del sys.modules[sibling]
                if module is not None:
                    sys.modules[sibling] = module

    return load
