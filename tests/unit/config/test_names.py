# SPDX-License-Identifier: Apache-2.0
"""Names that a user types stand in `scalerl_verl.names` alone; presets use no others and repeat no other default."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import scalerl_verl
from benchmarks.reference.keys import leaves
from scalerl_verl import names
from scalerl_verl.names.asking import SECTIONS, near_miss
from scalerl_verl.names.keys import KEYS
from scalerl_verl.names.kinds import Value

PACKAGE = Path(scalerl_verl.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "names" not in path.relative_to(PACKAGE).parts)
PRESETS = sorted((PACKAGE / "configs" / "scalerl").glob("*.yaml"))

PATHS = {value for name, value in vars(names).items() if name.isupper() and isinstance(value, str) and "." in value}
WORDS = {names.PLUGIN}.union(
    *names.VALUES.values(),
    *(kind.words for kinds in KEYS.values() for kind in kinds.values() if isinstance(kind, Value)),
)
ORDINARY = {names.BATCH, names.PROMPT, names.NONE, names.KEEP, names.DEVICE, names.HOST, names.STOP, names.WARN}
ORDINARY |= {names.GENERATOR_DTYPE, "float"}
"""Words that mean something else in most places."""
ELSEWHERE = {
    "pipeline/transfer.py": {names.FP32},
    "planning/layout.py": {names.FP32},
    "head/settings.py": {names.FP32},
    "head/verl_first_batch.py": {names.FP32},
    "cpu/platform.py": {names.GLOO},
}
"""Module -> words that are no names of ours there: dtypes of verl and vLLM, torch's backend."""
DIFFERENT = {
    *(("quickstart", f"{names.INTERRUPTION_SECTION}.{key}") for key in ("thinking_budget", "answer_budget", "phrase")),
    ("tiny", names.POLL_INTERVAL),
    *(("curriculum", f"{names.SAMPLER_SECTION}.{key}") for key in ("min_prompts", "min_responses")),
    ("fast_frontend", names.FAST_FRONTEND),
}
"""Preset and key that has another value than the default: of a tiny model, null, which a run fills in, and a switch."""


def strings_of(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string but docstrings."""
    tree = ast.parse(source)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value


def find_strays(source: str, elsewhere: frozenset[str] | set[str] = frozenset()) -> list[str]:
    """What of a module's strings is a name of ours, or holds the path of one."""
    paths = re.compile("|".join(rf"(?<![\w.]){re.escape(path)}(?!\w)" for path in sorted(PATHS, key=len, reverse=True)))
    words = WORDS - ORDINARY - elsewhere
    return [f"line {line}: {text!r}" for line, text in strings_of(source) if text in words or paths.search(text)]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_name_that_a_user_types_is_written_once(path: Path) -> None:
    module = str(path.relative_to(PACKAGE))
    strays = find_strays(path.read_text(encoding="utf-8"), ELSEWHERE.get(module, set()))
    assert not strays, f"{module} has names of scalerl_verl.names as literals: {strays}"


@pytest.mark.parametrize(
    ("stray", "is_one"),
    [
        ('loss = "scalerl_cispo"', True),
        ('y = f"{x} with trainer.v1.pipeline_rl.max_staleness={k}"', True),
        ('print("set algorithm.scalerl.zero_variance=keep")', True),
        ('def f():\n    """Reads algorithm.scalerl."""', False),
        ('path = "actor_rollout_ref.actor_of_another"', False),
    ],
)
def test_planted_literal_is_found(stray: str, is_one: bool) -> None:
    assert bool(find_strays(stray)) is is_one


def values_of(preset: Path) -> dict[str, Any]:
    content = yaml.safe_load(preset.read_text(encoding="utf-8"))
    content.pop("defaults", None)
    return leaves(content)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_preset_uses_names_that_exist(preset: Path) -> None:
    for path, value in values_of(preset).items():
        section, _, key = path.rpartition(".")
        if path in names.VALUES:
            assert near_miss(str(value), names.VALUES[path]) is None, f"{path}={value}"
        ours = key.startswith(SECTIONS.get(section, ())) if section in SECTIONS else section in KEYS
        other = path in (names.SAMPLER_CLASS_PATH, names.SAMPLER_LOG_FILE, names.POLL_INTERVAL)
        assert not ours or other or key in KEYS[section], path


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_preset_that_repeats_a_default_repeats_the_right_one(preset: Path) -> None:
    for path, value in values_of(preset).items():
        section, _, key = path.rpartition(".")
        if key in KEYS.get(section, {}):
            is_default = value == KEYS[section][key].default
            assert is_default is ((preset.stem, path) not in DIFFERENT), f"{path}={value}"


def test_default_of_every_key_is_allowed_there() -> None:
    for section, kinds in KEYS.items():
        for key, kind in kinds.items():
            assert kind.wrong(kind.default) is None, f"{section}.{key}={kind.default}"


@pytest.mark.parametrize("given", ["scalerl_cipso", "ScaleRL_CISPO", "scalerl-cispo"])
def test_misspelt_name_means_the_one_most_like_it(given: str) -> None:
    """Not the first by the alphabet."""
    assert near_miss(given, {"scalerl_capped", "scalerl_cispo", "scalerl_zero"}) == "scalerl_cispo"
