# SPDX-License-Identifier: Apache-2.0
"""Which engine opens which copy; tests/faults/test_relays.py has processes that share one."""

from __future__ import annotations

from scalerl_verl.pipeline.copies import StagedCopies


def test_one_generator_a_node_keeps_the_copy_of_all() -> None:
    copies = StagedCopies()
    copies.share({2: "a", 0: "a", 1: "b", 3: "b"})
    assert copies.sharers == {2, 3}
    kept_none = [("", b""), ("", b"")]
    first = {0: [("A", b"of a"), ("", b"")], 1: [("B", b"of b"), ("", b"")], 2: kept_none, 3: kept_none}
    copies.note_staged(first)
    assert [copies.to_open(rank) for rank in range(4)] == [[b"of a"] * 2, [b"of b"] * 2, [b"of a"] * 2, [b"of b"] * 2]
    for rank in (0, 1, 2):
        copies.note_opened(rank)
    assert copies.known == {"A", "B"}
    copies.note_staged({**first, 0: [("A", b""), ("", b"")]})
    assert copies.to_open(2) == [b""] * 2 and copies.to_open(3) == [b"of b"] * 2, "its swap had failed"


def test_another_keeper_is_taken_when_the_first_is_gone() -> None:
    copies = StagedCopies()
    copies.share({0: "a", 1: "a"})
    copies.note_staged({0: [("A", b"of 0")], 1: [("", b"")]})
    copies.note_opened(1)
    copies.share({1: "a"})
    assert copies.sharers == frozenset()
    copies.note_staged({1: [("B", b"of 1")]})
    assert copies.to_open(1) == [b"of 1"] and copies.known == {"B"}


def test_engine_in_the_place_of_another_has_nothing_open() -> None:
    copies = StagedCopies()
    copies.note_staged({0: [("A", b"where")]})
    copies.note_opened(0)
    assert copies.to_open(0) == [b""]
    copies.forget(0)
    assert copies.to_open(0) == [b"where"]


def test_each_rank_on_a_device_keeps_its_own() -> None:
    copies = StagedCopies()
    copies.note_staged({0: [("A", b"of 0"), ("B", b"of 1")]})
    assert copies.sharers == frozenset() and copies.to_open(0) == [b"of 0", b"of 1"]
    copies.note_opened(0)
    copies.note_staged({0: [("A", b""), ("C", b"anew")]})
    assert copies.to_open(0) == [b"", b"anew"]
