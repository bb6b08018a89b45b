# SPDX-License-Identifier: Apache-2.0
"""docs/api.md: its examples run, and every argument of its functions is described."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest

from benchmarks.reference import api
from tests.paths import REPO

EXAMPLES = re.findall(r"^```python\n(.*?)^```", (REPO / "docs" / "api.md").read_text(), re.MULTILINE | re.DOTALL)
FUNCTIONS = [(module, name) for module, names in api.SECTIONS.values() for name in names]


@pytest.mark.parametrize("part", range(len(api.SECTIONS)))
def test_example_runs(part: int) -> None:
    made: dict[str, Any] = {}
    exec(EXAMPLES[part], made)
    if "loss_BT" in made:
        assert made["loss_BT"].shape == (2, 2) and made["logp_train_BT"].grad is not None
    if "fit" in made:
        assert abs(made["fit"].A - 0.65) < 1e-6


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_every_argument_is_described(module: str, name: str) -> None:
    function = getattr(importlib.import_module(module), name)
    text = api.describe(module, name, function)
    arguments, _, _ = text.partition("**Arguments**")[2].partition("\n**")
    named = set(re.findall(r"\w+", " ".join(re.findall(r"^- `(.*?)`:", arguments, re.MULTILINE))))
    assert set(inspect.signature(function).parameters) <= named
    assert "Args:" not in text and "Raises:" not in text


def test_formula_is_a_block_and_its_stars_are_stars() -> None:
    assert api.prose("Return it.\n\n    a = b * c\n\nAs a_b * c_d, or `a * b`.") == (
        "Return it.\n\n```text\na = b * c\n```\n\nAs a\\_b \\* c\\_d, or `a * b`."
    )
