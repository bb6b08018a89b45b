# SPDX-License-Identifier: Apache-2.0
"""The comparison of two recordings finds what differs, and nothing that code which only moved makes differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden import normalise
from tests.golden.__main__ import compare
from tests.paths import REPO

BEFORE = {"loss": 1.0, "length": 16, "seconds": 3.0}


def write(folder: Path, step: dict[str, object]) -> Path:
    folder.mkdir()
    (folder / "runs.json").write_text(json.dumps({"sync step 1": step}))
    return folder


@pytest.mark.parametrize(
    ("now", "differences"),
    [
        ({**BEFORE, "loss": 1.00001, "seconds": 5.0}, 0),
        ({**BEFORE, "loss": 1.001}, 1),
        ({**BEFORE, "loss": float("nan")}, 1),
        ({**BEFORE, "more": 1}, 1),
        ({"loss": 1.0, "length": 16}, 1),
        ({**BEFORE, "length": None}, 1),
    ],
    ids=["rounding", "value", "no number", "new name", "lost name of an unsteady value", "null"],
)
def test_differences_are_counted(
    tmp_path: Path, now: dict[str, object], differences: int, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [write(tmp_path / "a", BEFORE), write(tmp_path / "b", {**BEFORE, "seconds": 4.0})]
    assert compare(before, write(tmp_path / "new", now)) == differences
    assert ("sync step 1" in capsys.readouterr().out) == bool(differences)


def test_module_that_moved_says_the_same_and_a_renamed_class_does_not() -> None:
    old, moved = "scalerl_verl.plugins.settings.Settings", "scalerl_verl.losses.Settings"
    assert normalise(f"{old} in {REPO}/scalerl_verl/a.py") == normalise(f"{moved} in {REPO}/scalerl_verl/b/c.py")
    assert normalise(old) != normalise("scalerl_verl.plugins.settings.Options")
    assert normalise("/tmp/pytest-of-a/pytest-1/popen-gw0/test_x0/f") == normalise(
        "/tmp/pytest-of-b/pytest-20/test_x13/f"
    )
