# SPDX-License-Identifier: Apache-2.0
"""The modules of the quickstart by their names."""

import importlib
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def quickstart() -> Callable[[str], ModuleType]:
    """Return a function from a module name of the quickstart to the module."""
    return lambda name: importlib.import_module(f"recipes.quickstart.{name}")
