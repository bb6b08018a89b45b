# SPDX-License-Identifier: Apache-2.0
"""The table of upstream symbols against the installed verl and vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from scalerl_verl.upstream.spec import PatchSpec, installed_version, keep_original, version_allowed
from scalerl_verl.verl.patches import SYMBOLS

WITHOUT_SOURCE = {
    "vllm.engine.begin_version": "a class that gets one more method; what that reads is tested on vLLM's own requests",
}
"""The only entries that may list no source hash, and why."""
MAX_CHANGED = 12
"""Symbols of verl and vLLM that are not what they were once our patches are applied."""

READ_ORIGINALS = """
import importlib, json
from scalerl_verl.cpu.vllm_alias import install_vllm_alias
from scalerl_verl.upstream.spec import resolve, source_hash
from scalerl_verl.verl.patches import SYMBOLS

install_vllm_alias()
found = {}
for spec in SYMBOLS:
    try:
        _, _, value = resolve(importlib.import_module(spec.module), spec.target)
    except Exception as error:
        found[spec.name] = {"error": f"{type(error).__name__}: {error}"}
        continue
    try:
        found[spec.name] = {"hash": source_hash(value)}
    except TypeError:
        found[spec.name] = {"type": type(value).__name__}
print("ORIGINALS " + json.dumps(found))
"""


def _run(code: str, answer: str, **more: str) -> Any:
    """What code prints after the word ``answer``, in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SCALERL_", "VERL_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, **more}, capture_output=True, text=True, timeout=300
    )
    lines = [line for line in done.stdout.split("\n") if line.startswith(f"{answer} ")]
    assert lines, done.stderr[-2000:]
    return json.loads(lines[-1].removeprefix(f"{answer} "))


@pytest.fixture(scope="module")
def originals() -> dict[str, dict[str, str]]:
    """Name -> source hash of the original, read in a process into which verl loads no plugin."""
    return _run(READ_ORIGINALS, "ORIGINALS", VERL_USE_EXTERNAL_PLUGINS="none")


@pytest.fixture(params=SYMBOLS, ids=lambda spec: spec.name)
def spec(request: pytest.FixtureRequest) -> PatchSpec:
    return request.param


def test_names_are_unique() -> None:
    names = [spec.name for spec in SYMBOLS]
    assert len(set(names)) == len(names)


def test_targets_are_unique() -> None:
    targets = [(spec.module, spec.target) for spec in SYMBOLS]
    assert len(set(targets)) == len(targets)


def test_entry_says_why_it_exists_and_when_it_goes(spec: PatchSpec) -> None:
    assert len(spec.why.split()) >= 5
    assert len(spec.removal.split()) >= 3
    assert spec.kind in ("register", "override", "wrap", "replace")
    assert spec.when in ("always", "named", "cpu")
    assert spec.module.split(".")[0] == spec.distribution == spec.name.split(".")[0]


def test_few_symbols_are_changed_upstream() -> None:
    """A subclass in one of verl's registries is worth more than a patch. Lower the number with each that goes."""
    assert len([spec for spec in SYMBOLS if spec.kind != "override"]) <= MAX_CHANGED


def test_override_changes_nothing_upstream(spec: PatchSpec) -> None:
    assert (spec.kind == "override") == (spec.build is keep_original)


def test_only_the_two_guards_are_there_in_runs_without_our_names() -> None:
    """Both pass everything through that does not use our names."""
    always = [spec.name for spec in SYMBOLS if spec.when == "always"]
    assert always == ["verl.startup_check", "verl.bypass_mode.keeps_loss"]


def test_target_exists_upstream(spec: PatchSpec, originals: dict[str, dict[str, str]]) -> None:
    assert "error" not in originals[spec.name], originals[spec.name]


def test_source_is_the_one_the_patch_was_written_for(spec: PatchSpec, originals: dict[str, dict[str, str]]) -> None:
    if not spec.sources:
        assert spec.name in WITHOUT_SOURCE, "list the source hash of the target, or argue here why it has none"
        return
    assert spec.name not in WITHOUT_SOURCE
    assert originals[spec.name].get("hash") in spec.sources


def test_targets_without_a_source_are_what_they_are_said_to_be(originals: dict[str, dict[str, str]]) -> None:
    by_name = {spec.name: spec for spec in SYMBOLS}
    for name in WITHOUT_SOURCE:
        assert by_name[name].kind == "register"


def test_installed_versions_are_supported(spec: PatchSpec) -> None:
    version = installed_version(spec.distribution)
    assert version is not None
    assert version_allowed(spec, version)


@pytest.mark.parametrize(
    ("distribution", "version", "allowed"),
    [
        ("verl", "0.9.0", False),
        ("verl", "0.9.1", True),
        ("verl", "0.9.2.dev0", True),
        ("verl", "0.8.0", False),
        ("verl", "0.10.0", False),
        ("verl", "0.10.0.dev0", False),
        ("vllm", "0.24.0", True),
        ("vllm", "0.28.0", True),
        ("vllm", "0.28.0+cpu", True),
        ("vllm", "0.23.0", False),
        ("vllm", "0.29.0", False),
    ],
)
def test_version_gate(distribution: str, version: str, allowed: bool) -> None:
    specs = [spec for spec in SYMBOLS if spec.distribution == distribution]
    assert specs
    assert {version_allowed(spec, version) for spec in specs} == {allowed}
