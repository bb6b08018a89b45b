# SPDX-License-Identifier: Apache-2.0
r"""JSON Lines: one JSON value a line, in UTF-8, cut at ``\n`` and at nothing else.

``str.splitlines`` also cuts at U+0085, U+2028 and others, which JSON leaves as they are inside a string.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def split_lines(text: str) -> list[str]:
    r"""Return the lines without their ends; blank ones stay, so that numbers of lines are right."""
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def read_records(path: Path) -> list[Any]:
    """Return the values of a file; a byte order mark and blank lines are left out.

    Raises:
        ValueError: a line is not JSON, or the file is not in UTF-8.
    """
    text = path.read_bytes().decode("utf-8-sig")
    return [json.loads(line) for line in split_lines(text) if line.strip()]


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An error of a write names the file, which Python leaves out."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, on the disk when this returns; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with _naming(part), part.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(part, path)


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a file, whole or not at all unless the process is killed; its folder is made.

    Raises:
        OSError: it cannot be written, a full disk included.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _naming(path), path.open("ab", buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size
        if stream.write(line + b"\n") < len(line) + 1:
            stream.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_lines(path: Path) -> list[bytes]:
    """The lines of a file as they are, each with its end; the last may have none."""
    *whole, rest = path.read_bytes().split(b"\n")
    return [line + b"\n" for line in whole] + ([rest] if rest else [])


def set_aside(path: Path, goes: Callable[[bytes], bool]) -> list[bytes]:
    """Move the lines of a file for which ``goes`` is true to ``<name>.superseded``; returns those that stay."""
    # In bytes, for a text also ends a line at U+0085 and others that JSON leaves as they are.
    lines = read_lines(path)
    gone = [line for line in lines if goes(line)]
    stay = [line for line in lines if not goes(line)]
    if gone:
        with path.with_name(path.name + ".superseded").open("ab") as stream:
            stream.writelines(line.rstrip(b"\n") + b"\n" for line in gone)
        replace_file(path, b"".join(stay))
    return stay
