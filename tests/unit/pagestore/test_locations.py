"""What is announced: the last word on each shard."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.grid import shards_in
from kvpool.core.location_digest import ChunkPlaces
from kvpool.core.outcome import Tier
from kvpool_pagestore.core import disk_map as disk_map_module
from kvpool_pagestore.core.admission import AdmissionRules
from kvpool_pagestore.core.disk_map import DiskMap
from kvpool_pagestore.core.events import PageEvents
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.core.page_table import ArenaLimits, PageTable
from kvpool_pagestore.core.sessions import Session
from kvpool_pagestore.core.slots import PageRecord, Slot, SpaceNeed
from kvpool_pagestore.engine.inventory import Announcer, Inventory, LocationBuffer
from tests.fixtures.pagestore import KEYSPACE, SPEC, TENANT, RecordingIndex, metadata, page_key


def table_with(staged_shards: int, disk_map: DiskMap | None = None) -> PageTable:
    """A page table with these shards of page 17's chunk in staging."""
    limits = ArenaLimits(
        arena_bytes=1 << 20, segment_bytes=1 << 16, first_segment_id=1, writer_bytes=1 << 20, grace_s=1.0
    )
    table = PageTable(limits, PageEvents(), AdmissionRules(), lambda: 0, disk_map)
    session = Session(b"s" * 16, TENANT, "peer", max_leases=8)
    for shard in shards_in(staged_shards):
        record = PageRecord(page_key(17, shard=shard), 4096, metadata(17))
        if table.reserve_slot(session, record, 4096) is SpaceNeed.SEGMENT:
            segment = table.space.plan_segment(TENANT, 4096)
            assert segment is not None
            table.space.segment_made(segment)
            table.reserve_slot(session, record, 4096)
        slot = table.begin_commit(session, session.last_lease_id)
        assert isinstance(slot, Slot) and table.finish_commit(slot, verified=True, dirty=False)
    return table


def test_changes_of_a_chunk_are_merged_and_named_by_their_group() -> None:
    buffer = LocationBuffer()
    buffer.note(page_key(17), metadata(17).group_head_hash, Tier.STAGING, True)
    buffer.note(page_key(17, shard=1), metadata(17).group_head_hash, Tier.STAGING, True)
    buffer.note(page_key(17), metadata(17).group_head_hash, Tier.DISK, True)
    staging, disk = buffer.take()
    assert (staging.added_shards, staging.removed_shards, staging.tier) == (0b11, 0, Tier.STAGING)
    assert staging.group_head_hash == page_key(16).chunk_hash
    assert (disk.added_shards, disk.tier) == (0b1, Tier.DISK)
    assert not buffer and buffer.take() == []


def test_a_dropped_keyspace_leaves_nothing_pending() -> None:
    buffer = LocationBuffer()
    buffer.note(page_key(1), metadata(1).group_head_hash, Tier.DISK, True)
    buffer.note(page_key(1, keyspace=b"o" * 16), metadata(1).group_head_hash, Tier.DISK, True)
    buffer.forget_keyspace(KEYSPACE)
    assert [change.keyspace for change in buffer.take()] == [b"o" * 16]


def test_what_is_left_of_a_dropped_keyspace_takes_back_shards_of_every_split() -> None:
    """The grid of the fixtures' keyspace has one shard of both heads and one of each."""
    book = KeyspaceBook()
    book.admit(TENANT, KEYSPACE, SPEC)
    chunk = page_key(17).chunk_hash
    for staged in (0b001, 0b010, 0b111):
        truth = Inventory(Announcer(RecordingIndex()), table_with(staged), book)
        (held,) = truth.locate(KEYSPACE, chunk)
        assert (held.shards, held.full_shards) == ((0, staged, 0), 0b001)
        ((change,),) = truth.of_keyspace(KEYSPACE)
        assert (change.added_shards, change.removed_shards) == (staged, 0b111 & ~staged)


def test_what_is_on_disk_is_listed_though_pages_come_and_go_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_map_module, "_PLACED_ROWS", 5)
    disk_map = DiskMap(lambda key: 1, PageEvents(), lambda: 0)
    for number in range(20):
        disk_map.add(page_key(number), metadata(number))
    chunks = Inventory(Announcer(RecordingIndex()), table_with(0, disk_map), KeyspaceBook()).chunks()
    found = hashes(next(chunks))
    assert len(found) == 5
    disk_map.add(page_key(20), metadata(20))
    disk_map.remove((page_key(19),))
    for places in chunks:
        found |= hashes(places)
    assert found >= {page_key(number).chunk_hash for number in range(19)}


def hashes(places: ChunkPlaces) -> set[bytes]:
    return {places.chunk_hashes[at : at + 16] for at in range(0, len(places.chunk_hashes), 16)}


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans()))))
def test_applying_all_changes_yields_what_is_held(rounds: list[list[tuple[int, bool]]]) -> None:
    buffer, truth, known = LocationBuffer(), 0, 0
    for steps in rounds:
        for shard, present in steps:
            buffer.note(page_key(1, shard=shard), metadata(1).group_head_hash, Tier.STAGING, present)
            truth = truth | 1 << shard if present else truth & ~(1 << shard)
        for change in buffer.take():
            assert not change.added_shards & change.removed_shards
            known = (known | change.added_shards) & ~change.removed_shards
        assert known == truth
