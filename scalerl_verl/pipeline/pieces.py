# SPDX-License-Identifier: Apache-2.0
"""Where weights lie in pieces of memory: the staging buffer goes by it, and `scalerl plan` counts with it."""

from __future__ import annotations

from collections.abc import Iterable

PIECE_BYTES = 64 << 20
"""Size of a piece; a larger weight has a piece of its own, of its own size."""
ALIGNMENT = 256
"""Bytes; a view has to be aligned to its dtype, and copies are fastest at addresses of whole cache lines."""
_FULL = 32
"""A piece counts as full once less than this fraction of it is free: 2 MiB are lost in one of 64 MiB at most."""


class Pieces:
    """The sizes of the pieces, and the place of each weight: in the first piece that has room for it."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._used: list[int] = []
        self._open: list[int] = []

    def place(self, num_bytes: int) -> tuple[int, int]:
        """Piece and byte offset of the next weight; the piece may be a new one, the last of `sizes`."""
        for index in self._open:
            if self._used[index] + num_bytes <= self.sizes[index]:
                return index, self._take(index, num_bytes)
        self.sizes.append(max(PIECE_BYTES, num_bytes))
        self._used.append(0)
        self._open.append(len(self.sizes) - 1)
        return len(self.sizes) - 1, self._take(len(self.sizes) - 1, num_bytes)

    def keep(self, ends: Iterable[tuple[int, int]]) -> None:
        """Forget all weights but those that end at byte ``end`` of piece ``index``, as pairs ``(index, end)``."""
        self._used = [0] * len(self.sizes)
        for index, end in ends:
            self._used[index] = max(self._used[index], _aligned(end))
        self._open = [index for index in range(len(self.sizes)) if not self._is_full(index)]

    def _take(self, index: int, num_bytes: int) -> int:
        offset = self._used[index]
        self._used[index] = _aligned(offset + num_bytes)
        if self._is_full(index):
            self._open.remove(index)
        return offset

    def _is_full(self, index: int) -> bool:
        return self.sizes[index] - self._used[index] < self.sizes[index] // _FULL


def pieces_bytes(weights: Iterable[int]) -> int:
    """Bytes of all pieces that weights of so many bytes each take, one after the other."""
    pieces = Pieces()
    for num_bytes in weights:
        pieces.place(num_bytes)
    return sum(pieces.sizes)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
