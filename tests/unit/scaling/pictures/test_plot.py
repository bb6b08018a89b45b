# SPDX-License-Identifier: Apache-2.0
"""What a picture shows of a run: its window, the extrapolation where there is one, names and words."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from scalerl_verl.scaling import fit_curve, sigmoid
from scalerl_verl.scaling.fit.prediction import band
from scalerl_verl.scaling.fit.result import CurveFit
from scalerl_verl.scaling.logs.segments import ReadError
from scalerl_verl.scaling.pictures import page, static
from scalerl_verl.scaling.pictures.style import may_extrapolate
from scalerl_verl.scaling.plot import write_plot

CURVES = Path(__file__).parents[1] / "curves"
HAS_PLOTLY = importlib.util.find_spec("plotly") is not None
pytest.importorskip("matplotlib")


def made(last: float = 50000.0, A: float = 0.645) -> CurveFit:
    compute = np.linspace(1500.0, last, 40)
    score = sigmoid(compute, A, 1.7, 8000.0, 0.3) + np.random.default_rng(0).normal(0, 0.004, 40)
    return fit_curve(compute, score, R0=0.3)


def read(name: str) -> CurveFit:
    table = np.genfromtxt(CURVES / f"{name}.csv", delimiter=",", names=True)
    return fit_curve(table["compute"], table["score"], table["stderr"])


def axes_of(fits: dict[str, CurveFit], kind: str = "curve", until: float = 2e5, title: str = ""):
    (axes,) = static.draw(fits, "GPU-hours", kind, until, title).axes
    return axes


def lines_of(axes, style: str) -> list[np.ndarray]:
    """x of the curves that are solid (`-`) or dashed (`--`)."""
    return [line.get_xdata() for line in axes.lines if line.get_linestyle() == style and len(line.get_xdata()) > 1]


@pytest.mark.parametrize("kind", ["curve", "linear"])
def test_each_curve_is_solid_in_its_own_window_and_dashed_beyond(kind):
    axes = axes_of({"long": made(), "short": made(30000.0)}, kind)
    assert [tuple(x[[0, -1]].round()) for x in lines_of(axes, "-")] == [(1500, 50000), (1500, 30000)]
    assert [tuple(x[[0, -1]].round()) for x in lines_of(axes, "--")] == [(50000, 200000), (30000, 200000)]
    marks = [line.get_xdata() for line in axes.lines if line.get_marker() == "|"]
    assert np.allclose(marks, [[1500, 50000], [1500, 30000]])


@pytest.mark.parametrize("name", ["identified_falling", "verl_q0.5b_resp512_val"])
def test_what_falls_or_rises_beyond_its_curve_is_not_extrapolated(name):
    fit = read(name)
    assert not may_extrapolate(fit)
    axes = axes_of({"run": fit}, until=1e4)
    assert not lines_of(axes, "--")
    (shade,) = (item for item in axes.collections if item.get_alpha() == 0.12)
    assert shade.get_paths()[0].vertices[:, 0].max() == pytest.approx(fit.points.compute[-1])


def test_runs_are_named_beside_their_curves_in_words():
    fits = {"steady": made(), "falling": read("identified_falling")}
    axes = axes_of(fits)
    steady, falling = (text.get_text() for text in axes.texts)
    assert steady.startswith("steady\n") and f"{fits['steady'].A:.3f}" in steady
    assert falling.startswith("falling\n") and "the score falls" in falling and "_" not in falling
    assert axes.get_legend() is None


@pytest.mark.parametrize("kind", ["curve", "linear"])
def test_log_axes_are_labelled_at_1_2_and_5(kind):
    axes = axes_of({"run": made()}, kind)
    axes.figure.canvas.draw()
    low, high = axes.get_xlim()
    shown = [label.get_text() for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
    assert shown == ["2,000", "5,000", "10k", "20k", "50k", "100k", "200k"]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf", ".html"])
@pytest.mark.parametrize("kind", ["curve", "linear"])
def test_every_suffix_is_what_it_says(suffix, kind, tmp_path):
    out = tmp_path / "deeper" / f"picture{suffix}"
    write_plot({"run": made()}, out, "GPU-hours", kind=kind)
    begins = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF", ".html": b"<!doctype html>"}
    assert out.read_bytes().startswith(begins[suffix])


def write_page(tmp_path: Path, title: str = "") -> tuple[str, str]:
    note = write_plot({"a & b": made()}, tmp_path / "page.html", "GPU-hours", title=title)
    return note, (tmp_path / "page.html").read_text(encoding="utf-8")


def test_page_without_plotly_is_whole_and_says_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "is_plotly_there", lambda: False)
    note, text = write_page(tmp_path, "Two <runs>")
    assert "pip install 'scalerl-verl[html]'" in note
    assert "<svg" in text and "src=" not in text and "a &amp; b" in text
    assert text.count("Two &lt;runs&gt;") == 2 and text.count("<h1>") == 1  # of the tab, and of the page


@pytest.mark.skipif(not HAS_PLOTLY, reason="needs the extra [html]")
def test_page_has_hover_over_points_and_curve_and_loads_nothing(tmp_path):
    note, text = write_page(tmp_path, "One title")
    assert note == "" and "Plotly.newPlot" in text and "<script src" not in text
    assert text.count("One title") == 2
    assert "by the curve beyond the run" in text and "a &amp; b" in text


@pytest.mark.skipif(not HAS_PLOTLY, reason="needs the extra [html]")
def test_page_draws_no_curve_beyond_a_run_that_falls(tmp_path):
    write_plot({"run": read("identified_falling")}, tmp_path / "page.html", "steps")
    assert "by the curve beyond the run" not in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("suffix", [".png", ".html"])
def test_missing_matplotlib_names_the_extra(suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "is_plotly_there", lambda: False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ReadError, match=r"scalerl-verl\[plot\]"):
        write_plot({"run": made()}, tmp_path / f"x{suffix}", "GPU-hours")


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf", ".html"])
def test_names_may_be_any_text_and_a_letter_that_the_font_lacks_is_said_once(suffix, tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr(page, "is_plotly_there", lambda: False)
    fits = {name: made() for name in ("no\udcff text", "two\nlines", "$x$_{2}", "$\\frac{", "\u540d\u524d")}
    note = write_plot(fits, tmp_path / f"x{suffix}", "$C$", title="\udcff $t$")
    assert "\u524d\u540d" in note and not recwarn.list
    drawn = [text.get_text().splitlines()[0] for text in axes_of({"$x$_{2}": made()}).texts]
    assert drawn == ["$x$_{2}"] and not axes_of({"$x$_{2}": made()}).texts[0].get_parse_math()


@pytest.mark.parametrize("name", ["verl_gemma2b_ppo_val", "verl_q0.5b_resp512_val"])
def test_band_is_smooth_over_many_decades_and_falls_nowhere(name):
    shade = band(read(name), 10.0, 2e5)
    assert np.diff(np.log10(shade.compute)).max() < 0.05
    assert (np.diff(shade.low) >= 0).all() and (np.diff(shade.high) >= 0).all()
    assert (shade.low <= shade.score + 1e-9).all() and (shade.score <= shade.high + 1e-9).all()
