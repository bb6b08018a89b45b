# SPDX-License-Identifier: Apache-2.0
"""Loads the modules of a recipe, which are scripts beside each other and not a package, by their path."""

import sys
from types import ModuleType

import pytest

from tests.recipe_modules import load_quickstart_module

SIBLINGS = ("task", "model")  # imported by plain name in prepare.py, as scripts do


@pytest.fixture(scope="session")
def quickstart():
    """Return a function from a module name of the quickstart to the module."""

    def load(name: str) -> ModuleType:
        if name != "prepare":
            return load_quickstart_module(name)
        # One `task` for both, so that the classes are the same; the plain names are gone again afterwards.
        hidden = {sibling: sys.modules.pop(sibling, None) for sibling in SIBLINGS}
        for sibling in SIBLINGS:
            sys.modules[sibling] = load_quickstart_module(sibling)
        try:
            return load_quickstart_module(name)
        finally:
            for sibling, module in hidden.items():
                del sys.modules[sibling]
                if module is not None:
                    sys.modules[sibling] = module

    return load
