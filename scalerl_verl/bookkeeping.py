# SPDX-License-Identifier: Apache-2.0
"""Files of ours that are written while a run trains: one that cannot be written ends no training."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

logger = logging.getLogger(__name__)
_said: set[tuple[str, int | None]] = set()


@contextlib.contextmanager
def bookkeeping(file: str, without: str) -> Iterator[None]:
    """Inside this context an OSError becomes a warning, logged once per file and cause in this process.

    Args:
        file: name of the file, for the message.
        without: what the run, or who looks at it, lacks then.
    """
    try:
        yield
    except OSError as error:
        if (file, error.errno) in _said:
            return
        _said.add((file, error.errno))
        logger.warning("%s cannot be written (%s): training goes on. %s. This is said once.", file, error, without)
