"""Many pages reserved together get what they would get one after the other, and others hear of it once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import Draining, KvPoolError
from kvpool.core.outcome import Admission, Tier
from kvpool_pagestore.core.admission import AdmissionRequest, AdmissionRules
from kvpool_pagestore.core.events import (
    BytesHeld,
    PageEvent,
    PageEvents,
    PagesEvicted,
    PagesLeft,
    PagesUsed,
    StagingChanged,
    Subscription,
)
from kvpool_pagestore.core.page_table import ArenaLimits, PageTable
from kvpool_pagestore.core.sessions import Session
from kvpool_pagestore.core.slots import PageRecord, Slot, SpaceNeed
from tests.fixtures.pagestore import KEYSPACE, TENANT, metadata, page_key

SLOT_BYTES = 4096
SLOTS = 8


class Side:
    """A page table with room for eight pages, and what it says to others."""

    def __init__(self, *, max_leases: int = 64, writer_slots: int = 2 * SLOTS) -> None:
        limits = ArenaLimits(
            arena_bytes=SLOTS * SLOT_BYTES,
            segment_bytes=SLOTS * SLOT_BYTES,
            first_segment_id=1,
            writer_bytes=writer_slots * SLOT_BYTES,
            grace_s=1.0,
        )
        self.said: list[PageEvent] = []
        self.rules, events = AdmissionRules(), PageEvents()
        kinds = (BytesHeld, StagingChanged, PagesLeft, PagesEvicted, PagesUsed)
        events.subscribe([Subscription(kind, self.said.append) for kind in kinds])
        self.table = PageTable(limits, events, self.rules, lambda: 0)
        self.session = Session(b"s" * 16, TENANT, "peer", max_leases=max_leases)
        segment = self.table.space.plan_segment(TENANT, SLOT_BYTES)
        assert segment is not None
        self.table.space.segment_made(segment)

    def one_by_one(self, numbers: Sequence[int]) -> list[object]:
        """As `together`, by `reserve_slot`."""
        return [kind(self.table.reserve_slot(self.session, record(number), SLOT_BYTES)) for number in numbers]

    def together(self, numbers: Sequence[int]) -> list[object] | None:
        answers = self.table.reserve_all(self.session, [record(number) for number in numbers], SLOT_BYTES)
        return None if answers is None else [kind(answer) for answer in answers]

    def commit(self) -> None:
        """Make all visible that was reserved."""
        for lease_id in list(self.session.writes):
            slot = self.table.begin_commit(self.session, lease_id)
            assert isinstance(slot, Slot) and self.table.finish_commit(slot, verified=True, dirty=False)

    @property
    def staged(self) -> set[bytes]:
        return {one.key.chunk_hash for one in self.table.ready_pages()}

    def total_bytes_said(self) -> int:
        return sum(event.size_bytes for event in self.said if isinstance(event, BytesHeld))


def record(number: int, kept: PageMetadata | None = None) -> PageRecord:
    return PageRecord(page_key(number), SLOT_BYTES, kept or metadata(number))


def kind(answer: Slot | Admission | KvPoolError | SpaceNeed | None) -> object:
    """The answer, for a slot its place."""
    return (answer.segment.segment_id, answer.index) if isinstance(answer, Slot) else answer


@pytest.mark.parametrize("numbers", [range(40, 44), [2, 3], [6, 50, 7, 51], range(40, 47)])
def test_they_get_what_they_would_get_one_by_one(numbers: Sequence[int]) -> None:
    sides = Side(), Side()
    for side in sides:
        side.one_by_one(range(6))
        side.commit()
        side.one_by_one([6])  # being written
        side.said.clear()
    first, second = sides
    assert first.together(numbers) == second.one_by_one(numbers)
    assert list(first.session.writes) == list(second.session.writes)
    assert first.staged == second.staged and first.total_bytes_said() == second.total_bytes_said()
    assert first.table.writer_bytes == second.table.writer_bytes
    for kinds in (PagesEvicted, PagesLeft, StagingChanged, PagesUsed):
        assert sum(isinstance(event, kinds) for event in first.said) <= 1


def full_side() -> tuple[Side, set[bytes]]:
    """A page table whose slots are all taken by pages that may be evicted, and the hashes of those."""
    side = Side()
    side.one_by_one(range(SLOTS))
    side.commit()
    side.said.clear()
    return side, side.staged


def test_no_page_that_is_there_makes_room_for_another_of_the_span() -> None:
    side, before = full_side()
    assert side.together([*range(40, 47), 7, 6]) is None
    assert side.staged == before and not side.session.writes and not side.said


def test_others_hear_once_of_all_that_made_room() -> None:
    side, before = full_side()
    assert side.together(range(40, 43)) is not None
    changed, freed, left, evicted, held = side.said
    assert isinstance(changed, StagingChanged) and not changed.present
    assert {one.key.chunk_hash for one in changed.records} == before - side.staged
    assert isinstance(left, PagesLeft) and len(left.keys) == 3
    assert (freed, held) == (BytesHeld(KEYSPACE, -3 * SLOT_BYTES), BytesHeld(KEYSPACE, 3 * SLOT_BYTES))
    assert evicted == PagesEvicted(Tier.STAGING, 3)


def test_pages_for_which_room_must_be_made_get_nothing_yet() -> None:
    side = Side()
    slots = side.together(range(SLOTS + 2))
    assert slots is not None and None not in slots[:SLOTS] and slots[SLOTS:] == [None, None]
    assert len(side.session.writes) == SLOTS


def test_nothing_changes_where_not_all_may_have_a_slot() -> None:
    asked: list[AdmissionRequest] = []

    def refuse(request: AdmissionRequest) -> KvPoolError:
        asked.append(request)
        return Draining("planted")

    for side in (Side(max_leases=3), Side(writer_slots=3), refusing := Side()):
        side.one_by_one([0])
        side.commit()
        if side is refusing:
            side.rules.set_rules((refuse,))
        side.said.clear()
        assert side.together([1, 2, 3, 4]) is None
        assert not side.said and not side.session.writes and side.table.writer_bytes == 0
    assert [request.size_bytes for request in asked] == [4 * SLOT_BYTES], "the rules are asked for all bytes at once"
    assert refusing.together([0]) == [Admission.EXISTS], "which needs no bytes"


def test_pages_that_are_to_be_pinned_are_asked_for_one_by_one() -> None:
    side = Side()
    pinned = PageMetadata(parent_hash=bytes(16), chunk_index=0, group_head_hash=bytes(16), pinned_until_us=1)
    assert side.table.reserve_all(side.session, [record(1), record(2, pinned)], SLOT_BYTES) is None
    assert not side.session.writes
