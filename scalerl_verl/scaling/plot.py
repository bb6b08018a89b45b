# SPDX-License-Identifier: Apache-2.0
"""`scalerl plot`: one file with the curves of some runs; its suffix says which kind."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from scalerl_verl.scaling.fit.result import CurveFit
from scalerl_verl.scaling.logs.segments import ReadError
from scalerl_verl.scaling.pictures import page, static
from scalerl_verl.terminal import as_text, printable

SUFFIXES = (".png", ".svg", ".pdf", ".html")
KINDS = ("curve", "linear")
EXTRAPOLATE = 4.0
TITLES = {"curve": "Compute and pass rate", "linear": "Log-log: lines of slope B"}
DPI = 150
MAX_LETTERS = 20


def check_name(path: Path) -> None:
    """Refuse a file name before anything is fitted.

    Raises:
        ReadError: its suffix names no kind of picture.
    """
    if path.suffix not in SUFFIXES:
        raise ReadError(f"{path}: the file name must end in {', '.join(SUFFIXES)}")


def write_plot(
    fits: Mapping[str, CurveFit],
    path: Path,
    unit: str,
    *,
    kind: str = "curve",
    until: float | None = None,
    title: str = "",
) -> str:
    """Draw fits into a file: PNG, SVG, PDF, or a self-contained HTML page with the table of fits.

    Args:
        fits: by name. unit: of the compute, for the axis.
        kind: `curve`: score against compute; `linear`: F(R) = (C / C_mid)^B, log-log.
        until: extrapolate up to this compute; None: 4 times the data.
        title: above the picture; empty for none.

    Returns:
        A note on what the file lacks; empty if nothing.

    Raises:
        ReadError: matplotlib is missing, or a file name or bound that means nothing.
    """
    check_name(path)
    if kind not in KINDS:
        raise ReadError(f"kind={kind!r}: use one of {', '.join(KINDS)}")
    last = max(float(fit.points.compute[-1]) for fit in fits.values())
    if until is not None and until <= last:
        raise ReadError(f"--until {until:g} must lie beyond the last point, {last:g}")
    end = until or last * EXTRAPOLATE
    path.parent.mkdir(parents=True, exist_ok=True)
    fits = {printable(name): fit for name, fit in fits.items()}
    unit, title = printable(unit), as_text(title)
    is_page = path.suffix == ".html"
    has_hover = is_page and kind == "curve" and page.is_plotly_there()
    with static.watch_letters() as missing:
        if is_page:
            picture = page.draw_hover(fits, unit, end) if has_hover else draw_svg(fits, unit, kind, end)
        else:
            static.draw(fits, unit, kind, end, title).savefig(path, dpi=DPI)
    notes = [_describe_missing(missing)]
    if is_page:
        path.write_text(page.make_page(picture, fits, unit, title or TITLES[kind]), encoding="utf-8")
        notes += [] if has_hover or kind != "curve" else ["the page has no hover: pip install 'scalerl-verl[html]'"]
    return "; ".join(filter(None, notes))


def _describe_missing(letters: set[str]) -> str:
    if not letters:
        return ""
    shown = "".join(sorted(letters)[:MAX_LETTERS])
    return (
        f"the font of the picture lacks {shown}, drawn as boxes: rename the runs with --names, or install a font that "
        "has them and name it in matplotlib's font.family"
    )


def draw_svg(fits: Mapping[str, CurveFit], unit: str, kind: str, until: float) -> str:
    """The picture as an element of a page.

    Raises:
        ReadError: matplotlib is missing.
    """
    text = io.StringIO()
    static.draw(fits, unit, kind, until, "").savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]
