# SPDX-License-Identifier: Apache-2.0
"""Run a callback right after a module has been executed, before its importer binds names from it.

verl binds most names by ``from x import y``: replacing ``x.y`` later misses every module that was imported
before. A callback that runs inside the import of ``x`` is seen by all of them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

ModuleCallback = Callable[[ModuleType], None]

_pending: dict[str, list[ModuleCallback]] = {}


class _CallbackLoader(importlib.abc.Loader):
    """Delegates to the real loader, then runs the callbacks registered for the module."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner = inner
        self._name = name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        for callback in _pending.get(self._name, []):
            callback(module)
        # Only now: if a callback fails and its error is swallowed, the next import has to fail as well.
        _pending.pop(self._name, None)

    def __getattr__(self, name: str) -> Any:
        # inspect, pkgutil and importlib.resources ask the loader for get_source, get_data, is_package, ...
        return getattr(self._inner, name)


class _CallbackFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _pending:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallbackLoader(spec.loader, fullname)
        return spec


_finder = _CallbackFinder()


def is_imported(name: str) -> bool:
    """Whether module ``name`` has finished executing in this process."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def after_import(name: str, callback: ModuleCallback) -> None:
    """Call ``callback(module)`` once: now if ``name`` is already imported, else at the end of its import.

    An exception of the callback propagates to whoever imports the module: a patch that cannot be applied
    must not look like one that was.
    """
    if is_imported(name):
        callback(sys.modules[name])
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _pending.setdefault(name, []).append(callback)
