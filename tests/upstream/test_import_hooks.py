# SPDX-License-Identifier: Apache-2.0
"""Callbacks at the end of a module's import, before its importer binds names from it."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scalerl_verl.upstream import import_hooks
from scalerl_verl.upstream.import_hooks import after_import, is_imported

WriteModule = Callable[[str, str], str]


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WriteModule]:
    """``write_module(name, source)`` makes a stub module importable; it and its hooks are gone after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(import_hooks, "_pending", {})
    meta_path, written = list(sys.meta_path), []

    def write(name: str, source: str) -> str:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        importlib.invalidate_caches()
        written.append(name)
        return name

    yield write
    sys.meta_path[:] = meta_path
    for name in written:
        sys.modules.pop(name, None)


def test_callback_sees_the_executed_module_and_its_importer_binds_the_replacement(write_module: WriteModule) -> None:
    upstream = write_module("stub_hooked_a", "x = 1\ny = x + 1\n")
    user = write_module("stub_user_a", "from stub_hooked_a import x\n")
    seen = []

    def replace(module: types.ModuleType) -> None:
        seen.append((module.__name__, module.y))
        module.x = "replaced"

    after_import(upstream, replace)
    assert seen == [], "the callback must wait for the import"
    assert importlib.import_module(user).x == "replaced"
    assert seen == [("stub_hooked_a", 2)]


def test_callback_runs_once_even_if_the_module_is_reloaded(write_module: WriteModule) -> None:
    name = write_module("stub_hooked_b", "x = 1\n")
    calls = []
    after_import(name, calls.append)
    module = importlib.import_module(name)
    importlib.reload(module)
    assert calls == [module]


def test_callback_of_an_imported_module_runs_at_once(write_module: WriteModule) -> None:
    name = write_module("stub_hooked_c", "x = 1\n")
    module = importlib.import_module(name)
    calls = []
    after_import(name, calls.append)
    assert calls == [module]
    assert name not in import_hooks._pending


def test_module_in_the_middle_of_its_import_counts_as_not_imported(write_module: WriteModule) -> None:
    write_module(
        "stub_hooked_d",
        "from scalerl_verl.upstream.import_hooks import is_imported\nduring = is_imported(__name__)\n",
    )
    module = importlib.import_module("stub_hooked_d")
    assert module.during is False
    assert is_imported("stub_hooked_d")
    assert not is_imported("stub_that_does_not_exist")


def test_failing_callback_fails_the_import_and_names_the_module(write_module: WriteModule) -> None:
    name = write_module("stub_hooked_e", "x = 1\n")
    user = write_module("stub_user_e", "import stub_hooked_e\n")

    def fail(module: types.ModuleType) -> None:
        raise RuntimeError(f"planted fault in {module.__name__}")

    after_import(name, fail)
    with pytest.raises(RuntimeError, match="planted fault in stub_hooked_e"):
        importlib.import_module(user)
    assert name not in sys.modules, "a module whose patch failed must not look imported"
    assert user not in sys.modules
    assert not is_imported(name)
    with pytest.raises(RuntimeError, match="planted fault"):
        importlib.import_module(name)  # whoever swallowed the first error must not get an unpatched module


def test_other_modules_are_loaded_by_the_ordinary_loader(write_module: WriteModule) -> None:
    hooked, other = write_module("stub_hooked_f", "x = 1\n"), write_module("stub_other_f", "x = 1\n")
    calls = []
    after_import(hooked, calls.append)
    module = importlib.import_module(other)
    assert calls == []
    assert type(module.__spec__.loader) is importlib.machinery.SourceFileLoader
    assert hooked in import_hooks._pending, "the import of another module must not use up the callback"


def test_several_callbacks_run_in_the_order_of_their_registration(write_module: WriteModule) -> None:
    name = write_module("stub_hooked_g", "x = []\n")
    for number in range(3):
        after_import(name, lambda module, number=number: module.x.append(number))
    assert importlib.import_module(name).x == [0, 1, 2]
    finders = [finder for finder in sys.meta_path if isinstance(finder, import_hooks._CallbackFinder)]
    assert len(finders) == 1


def test_submodule_of_a_package_is_hooked_by_its_dotted_name(write_module: WriteModule) -> None:
    write_module("stub_package_h.__init__", "")
    name = write_module("stub_package_h.inner", "x = 1\n")
    after_import(name, lambda module: setattr(module, "x", 2))
    assert importlib.import_module(name).x == 2
    sys.modules.pop("stub_package_h", None)


def test_source_of_a_hooked_module_can_still_be_read(write_module: WriteModule) -> None:
    source = "def double(x):\n    return 2 * x\n"
    name = write_module("stub_hooked_i", source)
    after_import(name, lambda module: None)
    module = importlib.import_module(name)
    assert inspect.getsource(module.double) == source
    assert module.__loader__.get_source(name) == source
    assert module.__spec__.loader.is_package(name) is False


def test_hooked_module_that_does_not_exist_is_an_ordinary_import_error(write_module: WriteModule) -> None:
    after_import("stub_that_is_missing", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="stub_that_is_missing"):
        importlib.import_module("stub_that_is_missing")
