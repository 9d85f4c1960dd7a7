"""Walking over pages to give up: each that is spared is asked about once, and goes on being a victim afterwards."""

from __future__ import annotations

from kvpool_pagestore.core.slots import Slot
from tests.fixtures.pagestore import KEYSPACE
from tests.unit.pagestore.test_segments import KIB, Table

COUNT = 64


def test_what_is_spared_is_asked_about_once_a_walk() -> None:
    table = Table(capacity_bytes=COUNT * 4 * KIB)
    pages = [table.page(number * 16) for number in range(COUNT)]  # chains of one page each
    asked: list[Slot] = []

    def spare(slot: Slot) -> bool:
        asked.append(slot)
        return slot.page.metadata.chunk_index % 64 != 0

    walk = table.space.victims([KEYSPACE], spare)
    gone = []
    for slot in walk:
        gone.append(slot.page.metadata.chunk_index)
        table.space.free(slot)
    assert sorted(gone) == list(range(0, COUNT * 16, 64))
    # Once by the policy, and once more by the walk over what the policy no longer offers.
    assert max(asked.count(slot) for slot in pages) <= 2

    again = table.space.victims([KEYSPACE], lambda slot: False)
    left = [next(again) for _ in range(3)]
    again.close()
    assert all(slot.idle and slot.page.metadata.chunk_index % 64 for slot in left)


def test_a_walk_that_ends_early_holds_nothing() -> None:
    table = Table(capacity_bytes=8 * 4 * KIB)
    first, *_ = [table.page(number * 16) for number in range(8)]
    walk = table.space.victims([KEYSPACE], lambda slot: slot is first)
    assert next(walk) is not first
    walk.close()
    assert first in list(table.space.victims([KEYSPACE], lambda slot: False))
