"""How the arena's space is cut, and what makes room for what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool_pagestore.core.segments import SegmentTable
from kvpool_pagestore.core.slots import PageRecord, Segment, Slot, SlotState, SpaceNeed, slot_bytes_for
from tests.fixtures.pagestore import metadata, page_key

KIB = 1024


class Table:
    """A segment table whose segments are made as soon as they are wanted."""

    def __init__(self, capacity_bytes: int = 64 * KIB, segment_bytes: int = 16 * KIB) -> None:
        self.evicted: list[int] = []
        self.now_us = 0
        self.space = SegmentTable(
            capacity_bytes=capacity_bytes,
            segment_bytes=segment_bytes,
            first_segment_id=10,
            on_evict=lambda slot: self.evicted.append(slot.page.metadata.chunk_index),
            now_us=lambda: self.now_us,
        )

    def allocate(self, slot_bytes: int = 4 * KIB, tenant: str = "a") -> Slot | SpaceNeed:
        answer = self.space.allocate(tenant, slot_bytes)
        if answer is SpaceNeed.SEGMENT:
            segment = self.space.plan_segment(tenant, slot_bytes)
            assert segment is not None
            self.space.segment_made(segment)
            answer = self.space.allocate(tenant, slot_bytes)
        return answer

    def page(self, number: int, slot_bytes: int = 4 * KIB, tenant: str = "a") -> Slot:
        """A clean page in staging."""
        slot = self.allocate(slot_bytes, tenant)
        assert isinstance(slot, Slot)
        self.space.occupy(slot, SlotState.READY)
        slot.record = PageRecord(page_key(number), slot_bytes, metadata(number))
        self.space.update_evictable(slot)
        self.space.touch(slot)
        return slot


def test_a_slot_is_whole_memory_pages() -> None:
    assert [slot_bytes_for(size) for size in (1, 4096, 4097)] == [4096, 4096, 8192]


def test_the_budget_is_filled_before_anything_is_evicted_then_the_oldest_goes() -> None:
    table = Table()
    slots = [table.page(16 * number) for number in range(16)]  # chains of one page each
    assert table.space.segment_total_bytes == 64 * KIB and not table.evicted
    table.space.touch(slots[0])
    slots[1].readers = 1
    table.space.update_evictable(slots[1])
    table.page(1000)
    table.page(2000)
    assert table.evicted == [2 * 16, 3 * 16]


def test_the_end_of_a_chain_goes_and_a_page_in_use_keeps_those_before_it() -> None:
    table = Table()
    slots = [table.page(number) for number in range(16)]
    slots[14].readers = 1
    table.space.update_evictable(slots[14])
    table.page(100)
    assert table.evicted == [15]
    table.page(200)
    assert table.evicted == [15, 100], "pages 0 to 13 come before one that is being read"
    slots[14].readers = 0
    table.space.update_evictable(slots[14])
    table.page(300)
    assert table.evicted[2] in (14, 200)


def test_a_chain_that_fills_the_arena_gives_up_its_head_while_its_end_is_in_use() -> None:
    table = Table(capacity_bytes=16 * KIB)
    slots = [table.page(number) for number in range(4)]
    slots[3].readers = 1
    table.space.update_evictable(slots[3])
    table.page(100)
    assert table.evicted == [0]


def test_a_pinned_page_stays_and_keeps_its_segment() -> None:
    table = Table(capacity_bytes=16 * KIB)
    slots = [table.page(number * 16) for number in range(4)]
    assert slots[0].record is not None
    slots[0].record = replace(slots[0].record, metadata=replace(metadata(0), pinned_until_us=50))
    table.space.retain(slots[0])
    table.page(100)
    assert table.evicted == [16]
    assert table.allocate(16 * KIB) is SpaceNeed.FULL
    table.now_us = 50
    assert isinstance(table.allocate(16 * KIB), Slot)


def test_a_page_that_was_dropped_while_in_use_is_no_victim() -> None:
    table = Table(capacity_bytes=16 * KIB)
    slots = [table.page(16 * number) for number in range(4)]
    slots[0].readers, slots[0].deleted = 1, True
    table.space.update_evictable(slots[0])
    table.page(100)
    slots[0].readers = 0
    table.space.free(slots[0])
    table.page(200)
    assert table.evicted == [16]


def test_the_last_segment_takes_what_is_left_of_the_budget() -> None:
    table = Table(capacity_bytes=24 * KIB)
    for number in range(6):
        table.page(number)
    assert table.space.segment_total_bytes == 24 * KIB


def test_a_page_larger_than_a_segment_gets_one_of_its_own() -> None:
    table = Table()
    slot = table.page(1, 40 * KIB)
    assert slot.segment.size_bytes == 40 * KIB and slot.segment.slot_count == 1


def test_a_segment_of_another_size_is_emptied_when_its_own_class_has_nothing() -> None:
    table = Table()
    for number in range(16):
        table.page(number)
    slot = table.page(100, 16 * KIB)
    assert table.evicted == [0, 1, 2, 3]  # the segment that was unused for longest
    assert slot.segment.slot_count == 1 and slot.offset == 0


def test_a_segment_in_use_is_left_alone() -> None:
    table = Table()
    slots = [table.page(number) for number in range(16)]
    for slot in slots[::4]:
        slot.pins = 1
        table.space.update_evictable(slot)
    assert table.allocate(16 * KIB) is SpaceNeed.FULL
    assert not table.evicted


def test_a_segment_never_changes_tenant() -> None:
    table = Table()
    for number in range(16):
        table.page(number)
    assert table.allocate(tenant="b") is SpaceNeed.RETIREMENT
    (dying,) = table.space.reapable()
    assert dying.tenant == "a" and table.evicted == [0, 1, 2, 3]
    assert table.allocate(tenant="b") is SpaceNeed.RETIREMENT, "no second one goes while the first is on its way"
    table.space.segment_gone(dying)
    slot = table.allocate(tenant="b")
    assert isinstance(slot, Slot) and slot.segment.tenant == "b"
    assert slot.segment.segment_id != dying.segment_id


def test_a_segment_that_a_peer_maps_is_not_taken_for_another_tenant() -> None:
    table = Table(capacity_bytes=16 * KIB)
    slot = table.page(1)
    slot.segment.mappers.add(b"s" * 16)
    assert table.allocate(tenant="b") is SpaceNeed.FULL
    table.space.forget_mapper(b"s" * 16)
    assert table.allocate(tenant="b") is SpaceNeed.RETIREMENT


def test_old_segments_count_against_the_budget() -> None:
    table = Table()
    table.space.hold_old_bytes(64 * KIB)
    assert table.allocate() is SpaceNeed.FULL
    assert table.space.quarantined_bytes == 64 * KIB
    table.space.hold_old_bytes(-64 * KIB)
    assert isinstance(table.allocate(), Slot)


def test_a_segment_that_could_not_be_made_gives_its_bytes_back_and_pages_are_evicted_instead() -> None:
    table = Table()
    for number in range(4):
        table.page(16 * number)
    planned = table.space.plan_segment("a", 4 * KIB)
    assert planned is not None
    table.space.segment_gone(planned)
    assert table.space.segment_total_bytes == 16 * KIB
    table.space.growth_allowed = False
    table.page(100)
    assert table.evicted == [0]


def test_the_next_segment_is_wanted_before_the_last_slot_is_gone() -> None:
    table = Table()
    table.page(0)
    assert not table.space.runs_short("a", 4 * KIB)
    table.page(1)
    assert not table.space.runs_short("a", 4 * KIB)
    table.page(2)
    assert table.space.runs_short("a", 4 * KIB)
    assert table.space.plan_segment("a", 4 * KIB) is not None
    assert not table.space.runs_short("a", 4 * KIB), "one is being made"


def prepared(table: Table, size_bytes: int = 16 * KIB) -> int:
    """Prepare what the budget has room for: how many segments."""
    count = 0
    while (segment := table.space.plan_prepared(size_bytes)) is not None:
        table.space.segment_prepared(segment)
        count += 1
    return count


def test_a_class_takes_a_prepared_segment_at_once_and_the_budget_holds() -> None:
    table = Table()
    assert prepared(table) == 4 and table.space.prepared_bytes == table.space.segment_total_bytes == 64 * KIB
    slot = table.space.allocate("a", 8 * KIB)
    assert isinstance(slot, Slot) and (slot.segment.tenant, slot.segment.slot_bytes) == ("a", 8 * KIB)
    other = table.space.allocate("b", 4 * KIB)
    assert isinstance(other, Slot) and other.segment.tenant == "b"
    assert table.space.prepared_bytes == 32 * KIB and table.space.segment_total_bytes == 64 * KIB


def test_the_last_prepared_segment_takes_what_is_left_unless_that_is_of_no_use() -> None:
    table = Table(capacity_bytes=(5 << 20) + 4096, segment_bytes=4 << 20)
    sizes = [segment.size_bytes for segment in iter(lambda: table.space.plan_prepared(3 << 20), None)]
    assert sizes == [3 << 20, (2 << 20) + 4096]
    assert table.space.segment_total_bytes == table.space.capacity_bytes


def test_a_rest_that_is_of_no_use_is_left_to_what_needs_it() -> None:
    table = Table(capacity_bytes=(4 << 20) + 4096, segment_bytes=4096)
    assert prepared(table, 4 << 20) == 1
    assert isinstance(table.space.allocate("a", 8 * KIB), Slot)
    assert table.space.plan_segment("a", 4096) is not None


def test_no_segment_is_made_ahead_of_use_while_prepared_ones_are_left() -> None:
    table = Table(capacity_bytes=80 * KIB)
    planned = [table.space.plan_prepared(16 * KIB) for _ in range(4)]
    for segment in planned[:2]:
        assert segment is not None
        table.space.segment_prepared(segment)
    for number in range(4):
        table.page(number)
    assert not table.space.runs_short("a", 4 * KIB)
    for number in range(4, 8):
        table.page(number)
    assert table.space.runs_short("a", 4 * KIB)


def test_a_tenant_that_is_alone_is_assigned_everything_or_the_share_it_asks_for() -> None:
    table = Table()
    prepared(table)
    assert sum(one.size_bytes for one in table.space.assign("a", 20 * KIB, alone=True)) == 32 * KIB
    assert sum(one.size_bytes for one in table.space.assign("a", 20 * KIB, alone=True)) == 32 * KIB
    assert sum(one.size_bytes for one in table.space.assign("a", 0, alone=True)) == 64 * KIB
    assert table.space.prepared_bytes == 0 and table.space.segment_total_bytes == 64 * KIB


def test_a_tenant_that_is_not_alone_is_assigned_half_however_often_it_asks() -> None:
    table = Table(capacity_bytes=128 * KIB)
    prepared(table)
    for _ in range(3):
        assert sum(one.size_bytes for one in table.space.assign("a", 0, alone=False)) == 64 * KIB
    assert sum(one.size_bytes for one in table.space.assign("b", 0, alone=False)) == 32 * KIB


def test_an_assigned_segment_is_used_before_any_other_and_cut_then() -> None:
    table = Table()
    table.page(1)
    prepared(table)
    (own, assigned) = table.space.assign("a", 32 * KIB, alone=True)
    assert own.slot_bytes == 4 * KIB and assigned.slot_bytes == 0 and assigned.all_idle
    slot = table.page(2, 16 * KIB)
    assert slot.segment is assigned and assigned.slot_bytes == 16 * KIB
    assert table.page(3, 8 * KIB).segment not in (own, assigned)


def test_a_segment_that_was_assigned_and_is_not_mapped_goes_to_a_tenant_that_needs_one() -> None:
    table = Table()
    prepared(table)
    (first, *others) = table.space.assign("a", 0, alone=True)
    for segment in others:
        segment.mappers.add(b"s" * 16)
    assert table.allocate(tenant="b") is SpaceNeed.RETIREMENT
    assert table.space.reapable() == [first]
    table.space.segment_gone(first)
    slot = table.allocate(tenant="b")
    assert isinstance(slot, Slot) and slot.segment.tenant == "b"


def test_prepared_segments_make_way_for_a_page_that_is_larger() -> None:
    table = Table()
    prepared(table)
    table.page(1)
    assert table.allocate(40 * KIB) is SpaceNeed.RETIREMENT
    for segment in table.space.reapable():
        table.space.segment_gone(segment)
    slot = table.allocate(40 * KIB)
    assert isinstance(slot, Slot) and slot.segment.size_bytes == 40 * KIB
    assert table.space.segment_total_bytes <= table.space.capacity_bytes and table.space.prepared_bytes == 0


def test_an_emptied_segment_is_found_again_for_another_size() -> None:
    table = Table(capacity_bytes=16 * KIB)
    slots = [table.page(number) for number in range(4)]
    for slot in slots:
        table.space.free(slot)
    slot = table.page(10, 8 * KIB)
    assert not table.evicted and slot.segment is slots[0].segment


def test_a_full_arena_is_not_walked_for_each_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    is_idle = Segment.all_idle.fget  # type: ignore[attr-defined]  # a property

    def counted(segment: Segment) -> bool:
        nonlocal looks
        looks += 1
        return bool(is_idle(segment))

    count = 64
    table = Table(capacity_bytes=count * 16 * KIB)
    held = [table.page(number, 16 * KIB) for number in range(count)]
    for slot in held:
        slot.readers = 1
        table.space.update_evictable(slot)
    assert table.allocate(8 * KIB) is SpaceNeed.FULL
    monkeypatch.setattr(Segment, "all_idle", property(counted))
    for _ in range(100):
        assert table.allocate(8 * KIB) is SpaceNeed.FULL
    assert looks == 0
    held[7].readers = 0
    table.space.update_evictable(held[7])
    assert isinstance(table.allocate(8 * KIB), Slot) and table.evicted == [7]
    assert looks <= 8


def test_pages_in_use_are_not_walked_for_each_slot_of_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table()
    held = [table.page(number) for number in range(16)]
    for number, slot in enumerate(held):
        if number:
            slot.readers = 1
        else:
            slot.record = replace(slot.page, metadata=replace(slot.page.metadata, pinned_until_us=50))
            table.space.retain(slot)
        table.space.update_evictable(slot)
    looks = 0
    true_page = Slot.page.fget  # type: ignore[attr-defined]  # a property

    def counted(slot: Slot) -> PageRecord:
        nonlocal looks
        looks += 1
        record: PageRecord = true_page(slot)
        return record

    monkeypatch.setattr(Slot, "page", property(counted))
    for _ in range(100):
        assert table.allocate() is SpaceNeed.FULL
    assert looks <= 2
    table.now_us = 50
    assert isinstance(table.allocate(), Slot) and table.evicted == [0]


def test_segments_that_are_passed_over_for_their_pins_come_back_with_the_end_of_the_pins() -> None:
    table = Table()
    slots = [table.page(number, 16 * KIB) for number in range(4)]
    for number, slot in enumerate(slots):
        slot.record = replace(slot.page, metadata=replace(slot.page.metadata, pinned_until_us=100 - 10 * number))
        table.space.retain(slot)
    assert table.allocate(8 * KIB) is SpaceNeed.FULL
    slots[0].record = replace(slots[0].page, metadata=replace(slots[0].page.metadata, pinned_until_us=0))
    table.space.retain(slots[0])
    assert isinstance(table.allocate(8 * KIB), Slot) and table.evicted == [0], "unpinned"
    assert table.allocate(16 * KIB) is SpaceNeed.FULL
    table.now_us = 70
    table.page(10, 16 * KIB)
    assert table.evicted == [0, 3], "its pin has ended"


def test_no_page_goes_while_a_segment_of_the_class_is_being_made_however_many_are_wanted() -> None:
    table = Table(capacity_bytes=32 * KIB, segment_bytes=16 * KIB)
    for number in range(3):
        table.page(16 * number)
    assert table.space.plan_segment("a", 4 * KIB) is not None
    assert len(table.space.allocate_all("a", 4 * KIB, 3)) == 1  # the last free slot of the first segment
    assert not table.evicted
