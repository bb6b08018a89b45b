# SPDX-License-Identifier: Apache-2.0
"""The table of upstream symbols against the installed verl and vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from scalerl_verl.upstream.spec import PatchSpec, installed_version, is_bound, keep_original, source_problem
from scalerl_verl.upstream.versions import POLICIES
from scalerl_verl.verl.patches import SYMBOLS

FORM_ONLY = ("vllm.engine.begin_version",)
"""Beside calls the only entry without a source hash: a class that gets more methods. Calls bind what those use."""
MAX_CHANGED = 13
"""Symbols of verl and vLLM that are not what they were once our patches are applied."""

READ_ORIGINALS = """
import importlib, json
from scalerl_verl.cpu.vllm_alias import install_vllm_alias
from scalerl_verl.upstream.spec import is_importable, resolve, source_text
from scalerl_verl.upstream.static_source import read_source
from scalerl_verl.verl.patches import SYMBOLS

install_vllm_alias()
found = {}
for spec in SYMBOLS:
    if not is_importable(spec):
        found[spec.name] = {"source": read_source(spec.module, spec.target)}
        continue
    try:
        _, _, value = resolve(importlib.import_module(spec.module), spec.target)
    except Exception as error:
        found[spec.name] = {"error": f"{type(error).__name__}: {error}"}
        continue
    try:
        found[spec.name] = {"source": source_text(value)}
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
    assert spec.kind in ("register", "override", "call", "wrap", "replace")
    assert spec.when in ("always", "named", "cpu")
    assert spec.module.split(".")[0] == spec.distribution == spec.name.split(".")[0]


def test_few_symbols_are_changed_upstream() -> None:
    """A subclass in one of verl's registries is worth more than a patch. Lower the number with each that goes."""
    assert len([spec for spec in SYMBOLS if spec.changes_upstream]) <= MAX_CHANGED


def test_what_is_overridden_or_called_is_not_changed_upstream(spec: PatchSpec) -> None:
    assert (spec.kind in ("override", "call")) == (not spec.changes_upstream) == (spec.build is keep_original)


def test_only_the_guards_are_there_in_runs_without_our_names() -> None:
    """They pass everything through that does not use our names."""
    always = [spec.name for spec in SYMBOLS if spec.when == "always"]
    assert always == ["verl.startup_check", "verl.launch_check", "verl.bypass_mode.keeps_loss"]


def test_target_exists_upstream(spec: PatchSpec, originals: dict[str, dict[str, str]]) -> None:
    assert "error" not in originals[spec.name], originals[spec.name]


def test_source_is_the_one_the_entry_was_written_for(spec: PatchSpec, originals: dict[str, dict[str, str]]) -> None:
    assert is_bound(spec)
    source = originals[spec.name].get("source")
    assert source is not None, originals[spec.name]
    assert source_problem(spec, source) is None


def test_only_calls_are_bound_by_their_form_alone(spec: PatchSpec) -> None:
    assert bool(spec.sources) or spec.kind == "call" or spec.name in FORM_ONLY
    assert not (spec.sources and (spec.call or spec.attributes)), "the source says it all"


def test_vllm_s_engine_core_gets_methods_and_keeps_its_own() -> None:
    (core,) = [spec for spec in SYMBOLS if spec.name in FORM_ONLY]
    assert core.kind == "register"


def test_installed_versions_are_supported(spec: PatchSpec) -> None:
    version = installed_version(spec.distribution)
    assert version is not None
    assert POLICIES[spec.distribution].judge(version) == "supported"
