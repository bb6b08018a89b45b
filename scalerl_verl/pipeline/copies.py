# SPDX-License-Identifier: Apache-2.0
"""Whose staged copy of the weights each generator loads, and which its engine has open already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class StagedCopies:
    """The weight updater's record of staging buffers.

    On a device each rank of an engine keeps a copy. In host memory the first rank of one engine a node keeps the copy
    of all engines there.
    """

    def __init__(self) -> None:
        self._keepers: dict[int, int] = {}
        self._layouts: dict[str, bytes] = {}
        self._ids: dict[int, list[str]] = {}
        self._opened: dict[int, list[str]] = {}

    def share(self, nodes: Mapping[int, str]) -> None:
        """Let the first generator of each node keep the copy.

        Args:
            nodes: generator -> its node.
        """
        first: dict[str, int] = {}
        self._keepers = {rank: first.setdefault(nodes[rank], rank) for rank in sorted(nodes)}

    @property
    def sharers(self) -> frozenset[int]:
        """Generators that load from the copy of another one."""
        return frozenset(rank for rank, keeper in self._keepers.items() if rank != keeper)

    @property
    def known(self) -> frozenset[str]:
        """Ids of layouts that need not be told again."""
        return frozenset(self._layouts)

    def note_staged(self, staged: Mapping[int, Sequence[tuple[str, bytes]]]) -> None:
        """All weights of a version have arrived.

        Args:
            staged: generator -> of each rank, id and layout of the copy that it keeps, the layout empty if it is known;
                two empty ones of a rank that keeps none.
        """
        layouts = [entry for copies in staged.values() for entry in copies if entry[0]]
        self._layouts = {name: layout or self._layouts[name] for name, layout in layouts}
        for rank, copies in staged.items():
            shared = staged[self._keepers.get(rank, rank)][0][0]
            self._ids[rank] = [name or shared for name, _ in copies]

    def to_open(self, rank: int) -> list[bytes]:
        """For each rank of a generator's engine the layout that it has to open; b"" if it has it open."""
        before = self._opened.get(rank, [])
        return [
            b"" if before[place : place + 1] == [name] else self._layouts[name]
            for place, name in enumerate(self._ids[rank])
        ]

    def note_opened(self, rank: int) -> None:
        """The engine of a generator has loaded what `to_open` said."""
        self._opened[rank] = self._ids[rank]

    def forget(self, rank: int) -> None:
        """Another engine serves in the place of this generator's."""
        self._opened.pop(rank, None)
