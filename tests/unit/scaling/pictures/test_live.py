# SPDX-License-Identifier: Apache-2.0
"""The page of a running run: what it says, and that it never ends the run."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from scalerl_verl.ledger.compute import Totals, ValidationPoint
from scalerl_verl.ledger.forecast import fit_validations
from scalerl_verl.ledger.live import write_live_page
from scalerl_verl.scaling import sigmoid
from scalerl_verl.scaling.pictures import live


def validations(num: int) -> list[ValidationPoint]:
    points = [ValidationPoint(Totals(360.0), 0.3, 0.01, 100, 400)]
    for step in range(1, num + 1):
        score = float(sigmoid(float(step), 0.7, 1.8, 4.0, 0.3))
        points.append(ValidationPoint(Totals(3600.0 * step, 10, 8, 1.0, 10 * step), score, 0.01, 100, 400))
    return points


def write(path: Path, num: int, name: str = "a <run>") -> str:
    points = validations(num)
    write_live_page(path, name, points, fit_validations(points), 320)
    return path.read_text(encoding="utf-8")


def test_page_is_there_from_the_first_validation_and_grows(tmp_path):
    page = tmp_path / "live.html"
    first = write(page, 0)
    assert "No curve yet" in first and "<svg" not in first and "0.3000" in first
    assert 'http-equiv="refresh"' in first and "a &lt;run&gt;" in first and "<run>" not in first
    pytest.importorskip("matplotlib")
    later = write(page, 16)
    assert "<svg" in later and "Expected at the last step: 0.6" in later and "Step 160 of 320" in later
    assert list(tmp_path.iterdir()) == [page]


def test_without_matplotlib_there_is_a_page_without_a_picture(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = write(tmp_path / "live.html", 16)
    assert "<svg" not in text and "scalerl-verl[plot]" in text and "Expected at the last step" in text


def test_whatever_fails_is_logged_and_training_goes_on(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise ZeroDivisionError("of a drawing library")

    monkeypatch.setattr(live, "make_live_page", fail)
    points = validations(3)
    with caplog.at_level(logging.WARNING):
        write_live_page(tmp_path / "live.html", "run", points, None, 10)
    assert "training goes on" in caplog.text and "ZeroDivisionError" in caplog.text
