# SPDX-License-Identifier: Apache-2.0
"""Printing what files and logs hold: on a terminal that cannot show all of it, to a file that takes no more."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import unicodedata
from collections.abc import Callable

PIPE_CLOSED = 141
"""Exit code where nobody reads the output: a shell's for a program that SIGPIPE ended."""
INTERRUPTED = 130
"""Exit code of a shell for a program that the user stopped."""


class OutputError(OSError):
    """Standard output takes no text."""


def accept_any_text() -> None:
    """Let standard output and error show as an escape what their encoding lacks, in place of ending the program.

    In a C locale an arrow in a log or a name of a run would otherwise be a UnicodeEncodeError; in UTF-8 a file name
    that is none.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and (stream.errors == "strict" or not _is_utf8(stream)):
            stream.reconfigure(errors="backslashreplace")


def _is_utf8(stream: io.TextIOWrapper) -> bool:
    return stream.encoding.lower().replace("-", "") == "utf8"


def as_text(name: str) -> str:
    """A file name or other text as UTF-8 can have it: bytes that are none stand as escapes."""
    try:
        return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # half of a pair, which no file name gives
        return name.encode("utf-8", "backslashreplace").decode("utf-8")


def printable(name: str) -> str:
    """A name on one line of a table: `as_text`, with control characters as escapes."""
    return "".join(repr(char)[1:-1] if unicodedata.category(char) == "Cc" else char for char in as_text(name))


def say(text: str) -> None:
    """Print on standard output, at once.

    Raises:
        OutputError: it takes no text, as a full disk.
        BrokenPipeError: nobody reads it.
    """
    if sys.stdout is None:
        raise OutputError("the output cannot be written: standard output is closed")
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"the output cannot be written: {error.strerror or error}") from error


def run_to_end(command: Callable[[], int]) -> int:
    """The exit code of a command, also where its output goes nowhere or the user stops it: one line at most, then."""
    if sys.stderr is None:  # print would take standard output in its place
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end
    try:
        return command()
    except OutputError as error:
        print(f"error: {error}", file=sys.stderr)
        _let_go()
        return 1
    except BrokenPipeError:  # `| head` has read what it wanted
        _let_go()
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED


def _let_go() -> None:
    """The interpreter flushes once more at exit."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError, ValueError):  # a stream of a test has no number
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
