# SPDX-License-Identifier: Apache-2.0
"""Apply, activate, refuse and require patches, on stub modules that stand for verl and vLLM."""

from __future__ import annotations

import functools
import hashlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scalerl_verl.errors import PatchError
from scalerl_verl.upstream import import_hooks, registry, source_check, versions
from scalerl_verl.upstream.activation import ACTIVE_ENV, ALLOW_UNKNOWN_ENV, PLATFORM_ENV
from scalerl_verl.upstream.spec import PatchSpec, keep_original, source_hash
from scalerl_verl.upstream.versions import Difference, Policy

STUB = "stub_upstream"
POLICY = Policy("verl", "1.1.0", "1.2.0", tested=(), differs=(Difference("<1", "a planted difference"),))
"""The stub's version, 1.2.3, is unknown to it: the source decides."""
SOURCE = """\
def scale(x):
    return 10 * x


class Worker:
    def run(self):
        return "original"
"""


@pytest.fixture(autouse=True)
def isolated_registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty registry and hook table, a stub upstream on disk, stub version 1.2.3, no activation."""
    monkeypatch.setattr(registry, "_states", {})
    monkeypatch.setattr(registry, "on_change", [])
    monkeypatch.setattr(import_hooks, "_pending", {})
    monkeypatch.setattr(source_check, "installed_version", lambda distribution: "1.2.3")
    monkeypatch.setitem(versions.POLICIES, "verl", POLICY)
    for name in (ACTIVE_ENV, PLATFORM_ENV, ALLOW_UNKNOWN_ENV):
        monkeypatch.setenv(name, "")
    (tmp_path / f"{STUB}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    meta_path = list(sys.meta_path)
    yield
    sys.meta_path[:] = meta_path
    sys.modules.pop(STUB, None)


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run uses one of our names."""
    monkeypatch.setenv(ACTIVE_ENV, "1")


def build_negated(original: Callable[[int], int], module: ModuleType) -> Callable[[int], int]:
    def scale(x: int) -> int:
        return -original(x)

    return scale


def hash_of_stub() -> str:
    text = SOURCE.split("\n\n\n")[0]
    return hashlib.sha256(text.encode()).hexdigest()


def make_spec(**changes: Any) -> PatchSpec:
    fields: dict[str, Any] = {
        "name": "stub.scale",
        "module": STUB,
        "target": "scale",
        "build": build_negated,
        "kind": "wrap",
        "why": "a stub",
        "distribution": "verl",
        "sources": (hash_of_stub(),),
        "when": "named",
        "removal": "never",
    }
    return PatchSpec(**{**fields, **changes})


def make_call(**changes: Any) -> PatchSpec:
    return make_spec(**{"kind": "call", "build": keep_original, "sources": (), **changes})


def load() -> ModuleType:
    return importlib.import_module(STUB)


def status(name: str = "stub.scale") -> str:
    return registry.states()[name].status


def test_patch_is_applied_during_the_import_of_its_module(active: None) -> None:
    registry.install([make_spec()])
    assert status() == "waiting"
    assert load().scale(1) == -10
    assert status() == "applied"
    assert registry.states()["stub.scale"].late is False


def test_patch_is_applied_once_however_often_it_is_installed_activated_and_applied(active: None) -> None:
    spec = make_spec()
    registry.install([spec])
    registry.install([spec])
    module = load()
    registry.install([spec])
    registry.activate()
    registry.apply(spec, module)
    assert module.scale(1) == -10, "an even number of applications would give +10"


def test_method_of_a_class_is_a_target(active: None) -> None:
    spec = make_spec(
        name="stub.run",
        target="Worker.run",
        sources=(),
        build=lambda original, module: lambda self: original(self) + ", patched",
    )
    registry.install([spec])
    assert load().Worker().run() == "original, patched"


def test_registering_patch_leaves_the_target_alone(active: None) -> None:
    seen = []

    def register(original: Any, module: ModuleType) -> Any:
        seen.append(module.__name__)
        return original

    registry.install([make_spec(kind="register", sources=(), build=register)])
    module = load()
    assert seen == [STUB]
    assert module.scale.__module__ == STUB


def make_override(**changes: Any) -> PatchSpec:
    return make_spec(name="stub.run", target="Worker.run", kind="override", build=keep_original, **changes)


def test_override_is_bound_to_its_source_and_changes_nothing(active: None) -> None:
    registry.install([make_override(sources=(source_hash(load().Worker.run),))])
    assert status("stub.run") == "applied"
    assert load().Worker().run() == "original"


def test_method_that_a_subclass_of_ours_overrides_changed_upstream(active: None) -> None:
    registry.install([make_override(sources=("0" * 64,))])
    with pytest.raises(PatchError, match=r"the source of stub_upstream\.Worker\.run changed"):
        load()


def test_run_without_our_names_leaves_the_patch_dormant() -> None:
    registry.install([make_spec()])
    module = load()
    assert status() == "dormant"
    assert module.scale(1) == 10
    registry.activate()
    assert status() == "dormant", "activation of a process that is not active must do nothing"


@pytest.mark.parametrize(
    ("when", "environment", "expected"),
    [
        ("always", {}, "applied"),
        ("named", {}, "dormant"),
        ("named", {ACTIVE_ENV: "1"}, "applied"),
        ("named", {PLATFORM_ENV: "cpu"}, "applied"),
        ("cpu", {ACTIVE_ENV: "1"}, "dormant"),
        ("cpu", {PLATFORM_ENV: "CPU"}, "applied"),
        ("cpu", {PLATFORM_ENV: "nvidia"}, "dormant"),
    ],
)
def test_condition_decides_whether_a_patch_is_due(
    monkeypatch: pytest.MonkeyPatch, when: str, environment: dict[str, str], expected: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    registry.install([make_spec(when=when)])
    load()
    assert status() == expected


@pytest.mark.parametrize("late_ok", [False, True])
def test_activation_applies_a_dormant_patch_and_marks_it_late(monkeypatch: pytest.MonkeyPatch, late_ok: bool) -> None:
    registry.install([make_spec(late_ok=late_ok)])
    module = load()
    monkeypatch.setenv(ACTIVE_ENV, "1")
    registry.activate()
    assert status() == "applied"
    assert module.scale(1) == -10
    assert registry.states()["stub.scale"].late is not late_ok


def test_required_patch_that_came_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.install([make_spec()])
    load()
    monkeypatch.setenv(ACTIVE_ENV, "1")
    registry.activate()
    with pytest.raises(PatchError, match=r"stub\.scale: applied too late, stub_upstream had been imported before"):
        registry.require_active("stub.scale")


REFUSALS = {
    "target": ({"target": "absent"}, ["stub_upstream.absent does not exist in verl 1.2.3"]),
    "parent": ({"target": "Absent.run"}, ["stub_upstream.Absent.run does not exist in verl 1.2.3"]),
    "source": ({"sources": ("0" * 64,)}, ["the source of stub_upstream.scale changed in verl 1.2.3"]),
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_mismatch_is_refused_with_the_patch_the_reason_and_what_to_change(active: None, fault: str) -> None:
    changes, fragments = REFUSALS[fault]
    spec = make_spec(**changes)
    registry.install([spec])
    with pytest.raises(PatchError) as error:
        load()
    message = str(error.value)
    for fragment in [*fragments, "'stub.scale'", "Install verl 1.1.0 to 1.2.0", f"{ALLOW_UNKNOWN_ENV}=1"]:
        assert fragment in message
    assert status() == "refused"
    assert registry.states()["stub.scale"].detail in message
    assert STUB not in sys.modules, "the import must fail with the patch"


def test_module_without_an_installed_distribution_is_refused(active: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_check, "installed_version", lambda distribution: None)
    registry.install([make_spec()])
    with pytest.raises(PatchError, match="is not installed"):
        load()


def test_version_that_is_known_to_differ_is_refused_without_a_look_at_its_source(
    active: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_check, "installed_version", lambda distribution: "0.9.9")
    registry.install([make_spec()])
    with pytest.raises(PatchError, match=r"verl 0\.9\.9 is installed: a planted difference.*Install verl 1\.1\.0 to"):
        load()


def test_dormant_patch_is_not_checked_against_the_installed_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_check, "installed_version", lambda distribution: "0.9.9")
    registry.install([make_spec()])
    load()
    assert status() == "dormant"


def test_called_symbol_is_bound_and_left_as_it_is(active: None) -> None:
    registry.install([make_call(call="scale(x)")])
    module = load()
    assert status() == "applied"
    assert module.scale(1) == 10


CALL_FAULTS = {
    "source": ({"sources": ("0" * 64,)}, "the source of stub_upstream.scale changed in verl 1.2.3"),
    "call": ({"call": "scale(x, factor=2)"}, "stub_upstream.scale cannot be called any more as `scale(x, factor=2)`"),
    "attribute": ({"target": "Worker", "attributes": ("run", "gone")}, "stub_upstream.Worker has no gone"),
}


@pytest.mark.parametrize("fault", CALL_FAULTS)
def test_called_symbol_that_changed_is_refused(active: None, fault: str) -> None:
    changes, text = CALL_FAULTS[fault]
    registry.install([make_call(**changes)])
    with pytest.raises(PatchError, match=re.escape(text)):
        load()


@pytest.mark.parametrize("fault", ["version", "source"])
def test_unknown_source_is_patched_on_request_and_the_reason_is_kept(
    active: None, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv(ALLOW_UNKNOWN_ENV, "1")
    if fault == "version":
        monkeypatch.setattr(source_check, "installed_version", lambda distribution: "0.9.9")
    registry.install([make_spec(**({} if fault == "version" else REFUSALS["source"][0]))])
    assert load().scale(1) == -10
    assert status() == "applied"
    expected = "a planted difference" if fault == "version" else REFUSALS["source"][1][0]
    assert expected in registry.states()["stub.scale"].detail


def test_missing_target_is_refused_even_on_request(active: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_UNKNOWN_ENV, "1")
    registry.install([make_spec(target="absent")])
    with pytest.raises(PatchError, match="does not exist"):
        load()


def test_required_patches_are_all_named_with_their_state(active: None, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.install([make_spec(), make_spec(name="stub.waiting", module="stub_never_imported")])
    load()
    registry.install([make_spec(name="stub.dormant", when="cpu")])
    registry.require_active("stub.scale")
    with pytest.raises(PatchError) as error:
        registry.require_active("stub.scale", "stub.waiting", "stub.dormant", "stub.unknown")
    message = str(error.value)
    assert "stub.scale" not in message
    assert "stub.waiting: waiting  (stub_never_imported is not imported)" in message
    assert "stub.dormant: dormant  (stub_upstream is imported)" in message
    assert "stub.unknown: unknown in this process" in message
    assert "verl.trainer.main_ppo" in message and "scalerl doctor" in message


def test_change_is_announced_after_an_application_only(active: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    registry.on_change.append(lambda: seen.append(status()))
    registry.install([make_spec(), make_spec(name="stub.cpu", when="cpu")])
    load()
    assert seen == ["applied"]


def test_states_are_a_copy(active: None) -> None:
    registry.install([make_spec()])
    registry.states().clear()
    assert status() == "waiting"


def test_source_hash_sees_through_wrappers_and_ignores_indentation_and_trailing_blanks(tmp_path: Path) -> None:
    def same_text(indent: str, trailing: str) -> Any:
        lines = SOURCE.split("\n\n\n")[0].splitlines()
        text = "if True:\n" + "".join(f"{indent}{line}{trailing}\n" for line in lines)
        path = tmp_path / f"stub_text_{len(indent)}_{len(trailing)}.py"
        path.write_text(text)
        return importlib.import_module(path.stem).scale

    plain = load().scale
    wrapped = functools.wraps(plain)(lambda x: 0)
    hashes = {source_hash(value) for value in (plain, wrapped, same_text("    ", "  "))}
    assert hashes == {hash_of_stub()}
    assert source_hash(load().Worker) not in hashes


def test_source_hash_of_a_property_is_that_of_its_getter() -> None:
    class Owner:
        @property
        def size(self) -> int:
            return 1

    assert source_hash(Owner.size) == source_hash(Owner.size.fget)  # type: ignore[attr-defined]


def test_method_that_an_abstract_class_no_longer_defines_is_refused_by_its_file_alone(tmp_path: Path) -> None:
    """A class with any base could inherit it: the run would start Ray, and fail in a worker."""
    package = tmp_path / "stub_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inner.py").write_text("from abc import ABC\n\n\nclass Worker(ABC):\n    def run_all(self): ...\n")
    reason = source_check.static_mismatch(make_spec(module="stub_package.inner", target="Worker.run"))
    assert reason is not None and "Worker.run is not defined there" in reason
