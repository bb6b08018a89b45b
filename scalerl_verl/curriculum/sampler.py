# SPDX-License-Identifier: Apache-2.0
"""A sampler that skips mastered prompts of another sampler's order.

An epoch is one pass of the sampler over what is left. Where rows are copies of a prompt, a pass visits it several
times; an epoch then has as many rows as there are prompts left, and several epochs may lie in one pass. What an epoch
skips is decided once, when its first row is drawn, and stays fixed until the next epoch begins: results that arrive
later (asynchronous trainers draw prompts ahead of their results) count from then on. The order is the wrapped sampler's
own, so the first epoch draws what a run without filtering draws.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import Sampler

from scalerl_verl.curriculum.history import PassHistory
from scalerl_verl.curriculum.rules import DroppedPrompt, ResamplingRules, choose_drops
from scalerl_verl.names import SAMPLER_SECTION

_VERSION = 1
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpochChange:
    """What the beginning of an epoch changed.

    Attributes:
        epoch: number of the epoch, from 1.
        dropped: prompts that leave with this epoch.
        kept_by_floor: mastered prompts that stay because too few would be left.
        readmitted: ids that return with this epoch.
        num_remaining: distinct prompts drawn in this epoch.
        num_dropped: distinct prompts of the data that are not.
    """

    epoch: int
    dropped: tuple[DroppedPrompt, ...]
    kept_by_floor: tuple[DroppedPrompt, ...]
    readmitted: tuple[str, ...]
    num_remaining: int
    num_dropped: int


class EpochObserver(Protocol):
    """Whoever keeps a record of what was dropped."""

    def epoch_began(self, change: EpochChange) -> None:
        """The first row of an epoch is about to be drawn."""

    def resumed(self, epoch: int) -> None:
        """The state of a checkpoint was loaded that was taken in ``epoch``: later epochs have not happened."""


class _HistoryNow:
    """Stands for the history in a state dict and becomes a plain dict when pickled (or copied).

    A loader with worker processes takes its sampler's state when it hands a batch to them, several batches before the
    trainer sees it: the position must be of that moment, but results recorded since must not be missing in the file.
    """

    def __init__(self, history: PassHistory) -> None:
        self._history = history

    def plain(self) -> dict[str, Any]:
        return self._history.state_dict()

    def __reduce__(self) -> tuple[type, tuple[list[tuple[str, Any]]]]:
        return dict, (list(self.plain().items()),)


class NoPositiveResampling(Sampler[int]):
    """Draws rows in the order of ``base`` without those whose prompt was mastered (arXiv 2510.13786, section 2).

    Args:
        base: sampler over all rows; if its iterator has ``state_dict`` and ``load_state_dict``, they are used.
        prompt_ids: stable id of the prompt of each row of the data. Rows with equal ids share one history and leave
            together; counts and floor are in distinct ids.
        rules: when a prompt is mastered, and the floor.
        observer: told at the beginning of each epoch, and after loading a checkpoint.
        group_sizes: responses a visit, of prompts that ask for a number of their own.
    """

    def __init__(
        self,
        base: Any,
        prompt_ids: Sequence[str],
        rules: ResamplingRules,
        observer: EpochObserver | None = None,
        group_sizes: Mapping[str, int] | None = None,
    ) -> None:
        if len(prompt_ids) == 0:
            raise ValueError("prompt_ids is empty: the training data has no rows; check data.train_files and filters")
        self.base = base
        self.rules = rules
        self.group_sizes = dict(group_sizes or {})
        self.history = PassHistory()
        self._ids = list(prompt_ids)
        self._distinct = sorted(set(self._ids))
        self._data = hashlib.sha256("\n".join(self._ids).encode()).hexdigest()
        self._observer = observer
        self._epoch = 0
        self._num_drawn = 0
        self._size = len(self._distinct)
        self._has_copies = len(self._distinct) < len(self._ids)
        # Replaced at the beginning of an epoch, never changed: state dicts refer to it. Values: epoch of the drop.
        self._dropped: Mapping[str, int] = {}

    def __iter__(self) -> Iterator[int]:
        return _Draws(self)

    def __len__(self) -> int:
        """Rows of a pass over what the current epoch draws."""
        return sum(prompt_id not in self._dropped for prompt_id in self._ids)

    @property
    def epoch(self) -> int:
        """Number of the epoch whose rows are being drawn, from 1; 0 before the first."""
        return self._epoch

    @property
    def num_dropped(self) -> int:
        """Distinct prompts of the data that are not drawn in this epoch."""
        return sum(prompt_id in self._dropped for prompt_id in self._distinct)

    @property
    def num_dropped_this_epoch(self) -> int:
        """Distinct prompts of the data that left at the beginning of this epoch."""
        return sum(self._dropped.get(prompt_id) == self._epoch for prompt_id in self._distinct)

    @property
    def num_remaining(self) -> int:
        """Distinct prompts drawn in this epoch."""
        return len(self._distinct) - self.num_dropped

    @property
    def fewest_of_a_pass(self) -> int:
        """Rows that a pass draws at least, however many epochs end in it: a batch has no more."""
        return min(self.rules.min_prompts, self.num_remaining) if self._has_copies else 0

    def draws(self, row: int) -> bool:
        """Whether a row of the data is drawn in this epoch."""
        return self._ids[row] not in self._dropped

    def begin_pass(self) -> None:
        """Begin an epoch, unless rows are copies and the present one is not over; called when a pass draws a row."""
        if self._epoch == 0 or not self._has_copies or self._is_over():
            self.begin_epoch()

    def take(self, row: int) -> bool:
        """Whether to draw the next row of a pass, which begins another epoch if the present one is over."""
        if self.draws(row) and self._is_over():
            self.begin_epoch()
        drawn = self.draws(row)
        self._num_drawn += drawn
        return drawn

    def _is_over(self) -> bool:
        return self._has_copies and self._num_drawn >= self._size

    def begin_epoch(self) -> EpochChange:
        """Count a new epoch and decide what it skips; called when its first row is drawn."""
        epoch = self._epoch + 1
        dropped = dict(self._dropped)
        wait = self.rules.readmit_after_epochs
        back = sorted(key for key, since in dropped.items() if wait is not None and epoch >= since + wait)
        for prompt_id in back:
            del dropped[prompt_id]
            self.history.forget(prompt_id)
        leaving: list[DroppedPrompt] = []
        kept: list[DroppedPrompt] = []
        if epoch >= self.rules.first_epoch:
            active = [prompt_id for prompt_id in self._distinct if prompt_id not in dropped]
            leaving, kept = choose_drops(active, self.history, self.rules, self.group_sizes)
        dropped.update((prompt.prompt_id, epoch) for prompt in leaving)
        self._epoch, self._num_drawn, self._dropped = epoch, 0, dropped
        self._size = self.num_remaining
        change = EpochChange(epoch, tuple(leaving), tuple(kept), tuple(back), self.num_remaining, self.num_dropped)
        if self._observer is not None:
            self._observer.epoch_began(change)
        return change

    def state_dict(self) -> dict[str, Any]:
        """Epoch, dropped prompts and history; the position in the epoch is in the iterator's state.

        Costs nothing per call. The history is that of the moment in which the dict is pickled or copied.
        """
        return {
            "version": _VERSION,
            "data": self._data,
            "epoch": self._epoch,
            "num_drawn": self._num_drawn,
            "dropped": self._dropped,
            "history": _HistoryNow(self.history),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        Raises:
            ValueError: the state is of another version of this class, or of other prompts altogether.
        """
        if state.get("version") != _VERSION:
            raise ValueError(
                f"the checkpoint's sampler state has version {state.get('version')}, but this reads {_VERSION}: "
                "resume with the version that wrote it, or start a new run (trainer.resume_mode=disable)"
            )
        history = state["history"]
        plain = history.plain() if isinstance(history, _HistoryNow) else history
        if state["data"] != self._data:
            self._compare_prompts({*plain["ids"], *state["dropped"]})
        self.history.load_state_dict(plain)
        self._epoch, self._dropped = int(state["epoch"]), dict(state["dropped"])
        # Checkpoints from before copies were looked at do not have it: their epoch lasts longer once, if there are any.
        self._num_drawn, self._size = int(state.get("num_drawn", 0)), self.num_remaining
        if self._observer is not None:
            self._observer.resumed(self._epoch)

    def _compare_prompts(self, known: set[str]) -> None:
        """Compare the prompts that a checkpoint of other data knows with those of the data.

        Raises:
            ValueError: they have none in common.
        """
        found = len(known & set(self._distinct))
        if known and not found:
            raise ValueError(
                f"the checkpoint knows {len(known)} prompts, and the training data has none of them. Either "
                "data.train_files names other data: set it to what it was. Or another version of scalerl_verl wrote "
                "the checkpoint and named prompts in another way: resume with that version. To keep the weights "
                "alone, delete data.pt in the checkpoint's folder: data and history begin anew"
            )
        _logger.warning(
            "The training data differs from that of the checkpoint, whose history knows %d prompts; %d of them are in "
            "the data. Histories follow each prompt by its content, but the position within the epoch now means other "
            "rows: prompts may be skipped or repeated once.",
            len(known),
            found,
        )


class _Draws(Iterator[int]):
    """One pass of a `NoPositiveResampling`.

    Making an iterator decides nothing: loaders make more of them than they use.
    """

    def __init__(self, sampler: NoPositiveResampling) -> None:
        self._sampler = sampler
        self._base: Any = iter(sampler.base)
        self._began = False
        self._num_taken = 0
        self._num_drawn = 0

    def __next__(self) -> int:
        if not self._began:
            self._sampler.begin_pass()
            self._began = True
        while True:
            try:
                row = int(next(self._base))
            except StopIteration:
                if self._num_drawn >= self._sampler.fewest_of_a_pass:
                    raise
                # Of a pass in which an epoch ended and another dropped what was left, there is less than a batch.
                self._base, self._num_taken = iter(self._sampler.base), 0
                continue
            self._num_taken += 1
            if self._sampler.take(row):
                self._num_drawn += 1
                return row

    def state_dict(self) -> dict[str, Any]:
        """Position in the wrapped sampler's order."""
        base = self._base.state_dict() if hasattr(self._base, "state_dict") else None
        return {"began": self._began, "num_taken": self._num_taken, "num_drawn": self._num_drawn, "base": base}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position; the sampler's own state must have been loaded before this iterator was made.

        Raises:
            ValueError: the state was left by another sampler.
        """
        if "began" not in state:
            raise ValueError(
                "the checkpoint was written without no-positive-resampling, so its place in the epoch means nothing to "
                f"this sampler: delete the section (~{SAMPLER_SECTION}), or start a new run "
                "(trainer.resume_mode=disable)"
            )
        if hasattr(self._base, "load_state_dict") != (state["base"] is not None):
            raise ValueError(
                "the checkpoint's order of the data comes from another kind of sampler (shuffled or not): set "
                "data.shuffle to what it was, or start a new run (trainer.resume_mode=disable)"
            )
        if state["base"] is not None:
            self._base.load_state_dict(state["base"])
        else:
            for _ in range(state["num_taken"]):
                next(self._base)
        self._began, self._num_taken = bool(state["began"]), int(state["num_taken"])
        # Checkpoints from before passes were counted do not have it: theirs ends where the order ends.
        self._num_drawn = int(state.get("num_drawn", self._sampler.fewest_of_a_pass))
