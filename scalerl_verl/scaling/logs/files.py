# SPDX-License-Identifier: Apache-2.0
"""What all readers of files need: their text, and packages beyond the standard library where they are needed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from scalerl_verl.scaling.logs.segments import ReadError


def need(module: str, what: str, package: str) -> Any:
    """A module of a package that may be missing.

    Raises:
        ReadError: it is; says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ReadError(f"reading {what} needs {package} ({error}): pip install {package}") from error


def read_text(path: Path) -> str:
    """The text of a log.

    Raises:
        ReadError: it is in another encoding than UTF-8, or no text.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ReadError(f"{path} is no text in UTF-8 ({error.reason} at byte {error.start}): convert it") from error
