# SPDX-License-Identifier: Apache-2.0
"""Printing what files and logs hold, on a terminal that cannot show all of it."""

from __future__ import annotations

import io
import sys


def accept_any_text() -> None:
    """Let standard output and error show as an escape what their encoding lacks, in place of ending the program.

    In a C locale an arrow in a log or a name of a run would otherwise be a UnicodeEncodeError.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="backslashreplace")
