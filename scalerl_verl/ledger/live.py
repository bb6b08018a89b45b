# SPDX-License-Identifier: Apache-2.0
"""The live page of a run: written anew after each validation, and never a reason for the run to end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from scalerl_verl.json_lines import replace_file
from scalerl_verl.ledger.compute import ValidationPoint
from scalerl_verl.ledger.forecast import expect_end
from scalerl_verl.scaling.fit.result import CurveFit

LIVE_FILE = "scalerl_live.html"
logger = logging.getLogger(__name__)


def write_live_page(
    path: Path, name: str, points: Sequence[ValidationPoint], fit: CurveFit | None, total_steps: int
) -> None:
    """Replace the page at `path`; whatever fails is logged with its traceback, and training goes on.

    Args:
        path: of the page. name: of the run. points: validations in order. fit: of them, if there is one.
        total_steps: planned length of the run.
    """
    try:
        from scalerl_verl.scaling.pictures.live import make_live_page

        rows = [(point.totals.steps, point.totals.gpu_hours, point.pass_rate) for point in points]
        page = make_live_page(name, rows, fit, expect_end(points, total_steps), total_steps)
        replace_file(path, page.encode())
    except Exception:  # a picture must not cost a run, whatever a drawing library does
        logger.warning("%s is not written after this validation; training goes on", path, exc_info=True)
