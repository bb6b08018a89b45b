# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling in pipeline_rl: what was rejected while a batch is gathered, and when that is too much.

verl says which finished groups are rejected: those with several responses that all have the same value of
``algorithm.filter_groups.metric``. They leave the queue, which lowers the N(u) of `scalerl_verl.pipeline.admission` and
so breaks nothing; the rule then starts as many others, under the version in use.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from scalerl_verl import names
from scalerl_verl.errors import NoSignalError
from scalerl_verl.names import select
from scalerl_verl.names.numbers import number

WARN_BATCHES = 10
"""Batches of rejected groups without one to train after which a run without a limit says so."""
logger = logging.getLogger(__name__)


class GroupFilter:
    """Counts rejected groups, and ends a run that finds too few others.

    verl's synchronous trainer of old counted generated batches: with ``max_batches`` of them and still no full batch to
    train, the run ended. Groups are generated one by one here, so the number is that of groups, in batches.

    Args:
        metric: what is compared: ``reward``, or an entry of what the reward function returns.
        max_batches: batches of groups that may be generated to fill one; 0 or less: no limit.
        batch_groups: groups of a batch.
    """

    COUNTS = ("groups_rejected", "tokens_rejected")

    def __init__(self, metric: str, max_batches: int, batch_groups: int) -> None:
        self.metric = metric
        self._max_batches, self._batch_groups = max_batches, batch_groups
        self._values: Counter[float] = Counter()
        self._has_warned = False

    def note(self, values: Mapping[float, int], num_kept: int) -> None:
        """Take note of a look at the finished groups.

        Args:
            values: value that all responses of a group have -> such groups, rejected in this look.
            num_kept: finished groups that can train.

        Raises:
            NoSignalError: the limit is reached and the batch is not full.
        """
        self._values.update(values)
        num = sum(self._values.values())
        if num_kept >= self._batch_groups:
            return
        if 0 < self._max_batches * self._batch_groups <= num + num_kept:
            raise NoSignalError(
                f"{self._describe(num)}: {names.FILTER_MAX_BATCHES}={self._max_batches} batches of "
                f"{self._batch_groups} groups were generated and {num_kept} groups can train. The data are too easy or "
                f"too hard for the policy, or the reward does not tell responses apart: look at these values; raise "
                f"{names.FILTER_MAX_BATCHES} (0: no limit), or train without refill "
                f"({names.FILTER_GROUPS}=False, {names.ZERO_VARIANCE}={names.DROP})"
            )
        if num >= WARN_BATCHES * self._batch_groups and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s, and %d can train; %s ends such a run", self._describe(num), num_kept, names.FILTER_MAX_BATCHES
            )

    def take(self) -> dict[float, int]:
        """Value -> groups rejected since the last batch; the count begins anew."""
        values, self._values, self._has_warned = dict(self._values), Counter(), False
        return values

    def _describe(self, num: int) -> str:
        shown = ", ".join(f"{value:g}: {count}" for value, count in self._values.most_common(3))
        return (
            f"{num} prompt groups were rejected since the last batch, because all responses of each have the same "
            f"{names.FILTER_METRIC}={self.metric} (value: groups; {shown})"
        )


def make_filter(config: Any) -> GroupFilter | None:
    """The filter of a composed config; None where ``algorithm.filter_groups`` is off."""
    if not select(config, names.FILTER_GROUPS, False):
        return None
    batch_groups = number(config, "data.train_batch_size")
    return GroupFilter(str(select(config, names.FILTER_METRIC)), number(config, names.FILTER_MAX_BATCHES), batch_groups)
