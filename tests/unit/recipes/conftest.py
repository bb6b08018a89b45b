# SPDX-License-Identifier: Apache-2.0
"""Loads the modules of a recipe, which are scripts beside each other and not a package, by their path."""

from collections.abc import Callable
from types import ModuleType

import pytest

from tests.recipe_modules import load_quickstart_module


@pytest.fixture(scope="session")
def quickstart() -> Callable[[str], ModuleType]:
    """Return a function from a module name of the quickstart to the module."""
    return load_quickstart_module
