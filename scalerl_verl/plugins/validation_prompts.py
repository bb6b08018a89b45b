# SPDX-License-Identifier: Apache-2.0
"""The prompt of each response of a validation, by its content: rows of the data that are copies are one prompt."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from scalerl_verl.plugins.prompt_ids import COLUMN, UnmarkedDataError, label_dataset, read_column, warn_of_copies

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
            self._give_up(f"{error}; {error.fix}")
            return
        self._is_marked = True
        warn_of_copies(ids, "data.val_files")

    def _give_up(self, reason: str) -> None:
        self._is_marked = False
        _logger.warning(
            "scalerl/validation/ takes each row of the validation data for a prompt of its own, so that with copies "
            "among them its standard error is too small: %s.",
            reason,
        )

    def begin(self) -> None:
        """Forget the uids of the validation before."""
        self._of_uid = {}

    def look(self, batch: Any) -> None:
        """Learn the uids of a batch (verl's KVBatchMeta) that verl has sampled and not yet deleted."""
        ids = read_column(batch) if self._is_marked else None
        if ids is not None:
            self._of_uid.update(zip((key.rsplit("_", 2)[0] for key in batch.keys), ids, strict=True))
        elif self._is_marked:
            self._give_up(f"the responses have no field {COLUMN}; an agent loop drops fields of the data: pass it on")

    def of(self, uids: Sequence[str]) -> list[str]:
        """The prompt of each uid."""
        return [self._of_uid.get(str(uid), str(uid)) for uid in uids]
