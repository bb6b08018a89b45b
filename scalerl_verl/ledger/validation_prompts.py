# SPDX-License-Identifier: Apache-2.0
"""The prompt of each response of a validation, by its content: rows of the data that are copies are one prompt."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from scalerl_verl.curriculum.prompt_ids import COLUMN, UnmarkedDataError, label_dataset, warn_of_copies

_logger = logging.getLogger(__name__)


class ValidationPrompts:
    """Finds the prompt of verl's ``uid``, which is drawn anew for each row in each validation.

    Data whose rows cannot be marked is validated all the same: each row then counts as a prompt, and the log says so.
    """

    def __init__(self) -> None:
        self._of_uid: dict[str, str] = {}
        self._is_marked = False

    def mark(self, dataset: Any, data_config: Any) -> None:
        """Mark the rows of verl's validation data with their prompts, and say how many are copies.

        Args:
            dataset: changed in place.
            data_config: the section ``data``.
        """
        try:
            ids = label_dataset(dataset, data_config)
        except UnmarkedDataError as error:
            _logger.warning(
                "scalerl/validation/ takes each row of the validation data for a prompt of its own, so that with "
                "copies among them its standard error is too small: %s; %s.",
                error,
                error.fix,
            )
            return
        self._is_marked = True
        warn_of_copies(ids, "data.val_files")

    @contextlib.contextmanager
    def watch(self, trainer: Any) -> Iterator[None]:
        """Learn the uids of the rows that a validation hands to verl's agent loops, whose responses may all fail."""
        self._of_uid = {}
        if not self._is_marked:
            yield
            return
        manager = trainer.agent_loop_manager
        original = manager.generate_sequences

        def generate_sequences(rows: Any, *args: Any, **kwargs: Any) -> Any:
            uids, ids = ([str(value) for value in rows[name]] for name in ("uid", COLUMN))
            self._of_uid.update(zip(uids, ids, strict=True))
            return original(rows, *args, **kwargs)

        manager.generate_sequences = generate_sequences
        try:
            yield
        finally:
            del manager.generate_sequences

    def of(self, uids: Sequence[str]) -> list[str]:
        """The prompt of each uid."""
        return [self._of_uid.get(str(uid), str(uid)) for uid in uids]
