# SPDX-License-Identifier: Apache-2.0
"""Which prompt groups may start and which may train, so that no trained token is older than k versions.

Version v is the policy after v optimizer steps. A group (one prompt, all its responses) starts at the version that is
in use when it is handed to the generators; none of its tokens can be older. The step that turns version v into v + 1
trains B groups, whose tokens must come from versions v - k or later. Write N(u) for the number of groups, started and
not yet trained, whose start version is u or less. The rule keeps, at every moment,

    N(u) <= B * (u + k + 1 - v)    for every u with v - k <= u <= v,    and N(u) = 0 for u < v - k:

the groups that have to train by the step of version u + k fit into the steps that are left until then. It says two
things:

- admission: a group may start while N(v) < B * (k + 1). More would have to be thrown away some day; fewer would let
  the generators run dry.
- selection: B finished groups, the oldest first, train as soon as the rest still fulfils the inequality for v + 1.
  Otherwise the trainer waits for a straggler that would become too old.

The trainer never waits for ever: once everything that is running has finished, the B oldest groups always qualify,
because taking B groups off the oldest end lowers each N(u) by B or to 0. With k = 0 only the B groups of the next batch
are ever started, and all of them before its step: exactly on-policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Group = TypeVar("Group", bound=Hashable)


@dataclass(frozen=True)
class AdmissionRule:
    """The rule above for one batch size and one bound.

    Args:
        batch_groups: B, prompt groups of one optimizer step.
        max_staleness: k, versions a trained token may be behind the policy that trains it.
    """

    batch_groups: int
    max_staleness: int

    def __post_init__(self) -> None:
        if self.batch_groups < 1 or self.max_staleness < 0:
            raise ValueError(
                f"batch_groups={self.batch_groups} must be 1 or more, max_staleness={self.max_staleness} 0 or more"
            )

    def num_to_admit(self, num_untrained: int, num_steps_left: int | None = None, most: int | None = None) -> int:
        """Groups that may start now.

        Args:
            num_untrained: groups that were started and have not trained, finished ones included.
            num_steps_left: optimizer steps until the end of the run, the next one included; None: no end. Data for
                steps that will not come would be thrown away.
            most: groups that may be untrained at once, where these are to be fewer than the rule allows.
        """
        num_batches = self.max_staleness + 1
        if num_steps_left is not None:
            num_batches = min(num_batches, num_steps_left)
        allowed = self.batch_groups * num_batches
        return max(0, (allowed if most is None else min(allowed, most)) - num_untrained)

    def select(self, version: int, finished: Mapping[Group, int], running: Iterable[int]) -> list[Group] | None:
        """The groups of the next batch, oldest first, or None: wait.

        Args:
            version: the policy that is about to be trained.
            finished: group -> start version of what is complete; equally old groups in the order of the mapping.
            running: start version of each group that was started and is not complete.

        Raises:
            RuntimeError: the data were not admitted by this rule: a group is older than it allows.
        """
        left = Counter(running)
        left.update(finished.values())
        if not self.holds(version, left):
            raise RuntimeError(
                f"groups by start version {dict(sorted(left.items()))} cannot all train within {self.max_staleness} "
                f"versions of version {version} in batches of {self.batch_groups}: they were not admitted by this "
                "rule, which is a fault of scalerl_verl: report it"
            )
        if len(finished) < self.batch_groups:
            return None
        batch = sorted(finished, key=lambda group: finished[group])[: self.batch_groups]
        left.subtract(finished[group] for group in batch)
        return batch if self.holds(version + 1, left) else None

    def keep(self, version: int, finished: Mapping[Group, int]) -> set[Group]:
        """The groups of a restored queue that can still train, as many as possible, the newest first.

        Under the rule that admitted them these are all. A smaller k or B has fewer steps for them, or smaller ones.
        """
        kept: set[Group] = set()
        counts: Counter[int] = Counter()
        for group in sorted(finished, key=lambda group: finished[group], reverse=True):
            counts[finished[group]] += 1
            if self.holds(version, counts):
                kept.add(group)
            else:
                counts[finished[group]] -= 1
        return kept

    def holds(self, version: int, untrained: Mapping[int, int]) -> bool:
        """Whether groups (start version -> number) fulfil the inequality at ``version``."""
        waiting = 0
        for start in sorted(untrained):
            waiting += untrained[start]
            if waiting > self.batch_groups * max(0, start + self.max_staleness + 1 - version):
                return False
        return True
