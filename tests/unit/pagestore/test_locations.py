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
from kvpool_pagestore.core.events import DiskChanged, PageEvents, StagingChanged, Subscription
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.core.page_table import ArenaLimits, PageTable
from kvpool_pagestore.core.sessions import Session
from kvpool_pagestore.core.slots import PageRecord, Slot, SpaceNeed
from kvpool_pagestore.engine.inventory import Announcer, Inventory
from tests.fixtures.pagestore import KEYSPACE, SPEC, TENANT, RecordingIndex, metadata, page_key


def table_with(staged_shards: int, disk_map: DiskMap | None = None, events: PageEvents | None = None) -> PageTable:
    """A page table with these shards of page 17's chunk in staging."""
    limits = ArenaLimits(
        arena_bytes=1 << 20, segment_bytes=1 << 16, first_segment_id=1, writer_bytes=1 << 20, grace_s=1.0
    )
    table = PageTable(limits, events or PageEvents(), AdmissionRules(), lambda: 0, disk_map)
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


def test_pages_that_became_durable_together_are_one_change_of_their_chunk() -> None:
    index = RecordingIndex()
    pages = [(page_key(17, shard=shard), metadata(17).group_head_hash) for shard in (0, 1)]
    other = (page_key(18), metadata(18).group_head_hash)
    Announcer(index).disk(DiskChanged([pages[0], other, pages[1]], True))
    first, second = index.changes
    assert (first.added_shards, first.removed_shards, first.tier) == (0b11, 0, Tier.DISK)
    assert first.group_head_hash == page_key(16).chunk_hash
    assert (second.chunk_hash, second.added_shards) == (page_key(18).chunk_hash, 0b1)


def test_pages_that_appear_together_are_one_change_of_their_chunk_before_any_leaves() -> None:
    events, index = PageEvents(), RecordingIndex()
    table = table_with(0b111, events=events)
    events.subscribe([Subscription(StagingChanged, Announcer(index).staging)])
    slots = table.chunk_slots(KEYSPACE, page_key(17).chunk_hash)
    for slot in slots:
        slot.is_announced = False
    with events.merged():
        for slot in slots[:2]:
            table.reannounce(slot)
        assert not index.changes
        table.drop(slots[0].page.key)
        table.reannounce(slots[2])
    assert [(one.added_shards, one.removed_shards) for one in index.changes] == [(0b11, 0), (0, 0b1), (0b100, 0)]


def test_what_is_left_of_a_dropped_keyspace_takes_back_shards_of_every_split() -> None:
    """The grid of the fixtures' keyspace has one shard of both heads and one of each."""
    book = KeyspaceBook()
    book.admit(TENANT, KEYSPACE, SPEC)
    chunk = page_key(17).chunk_hash
    for staged in (0b001, 0b010, 0b111):
        truth = Inventory(table_with(staged), book)
        ((name, held),) = truth.locate(KEYSPACE, [chunk, page_key(18).chunk_hash])
        assert name == chunk
        assert (held.shards, held.full_shards) == ((0, staged, 0), 0b001)
        ((change,),) = truth.of_keyspace(KEYSPACE)
        assert (change.added_shards, change.removed_shards) == (staged, 0b111 & ~staged)


def test_what_is_on_disk_is_listed_though_pages_come_and_go_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_map_module, "_PLACED_ROWS", 5)
    disk_map = DiskMap(lambda key: 1, PageEvents(), lambda: 0)
    for number in range(20):
        disk_map.add(page_key(number), metadata(number))
    chunks = Inventory(table_with(0, disk_map), KeyspaceBook()).chunks()
    found = hashes(next(chunks))
    assert len(found) == 5
    disk_map.add(page_key(20), metadata(20))
    disk_map.remove((page_key(19),))
    for places in chunks:
        found |= hashes(places)
    assert found >= {page_key(number).chunk_hash for number in range(19)}


def hashes(places: ChunkPlaces) -> set[bytes]:
    return {places.chunk_hashes[at : at + 16] for at in range(0, len(places.chunk_hashes), 16)}


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans())))
def test_applying_all_changes_yields_what_is_held(steps: list[tuple[int, bool, bool]]) -> None:
    """Each is announced in the turn of the loop in which it happens, so that what is held is never ahead of it."""
    index, truth, known = RecordingIndex(), {Tier.STAGING: 0, Tier.DISK: 0}, {Tier.STAGING: 0, Tier.DISK: 0}
    announcer = Announcer(index)
    for shard, present, on_disk in steps:
        key, tier = page_key(1, shard=shard), Tier.DISK if on_disk else Tier.STAGING
        if on_disk:
            announcer.disk(DiskChanged([(key, metadata(1).group_head_hash)], present))
        else:
            announcer.staging(StagingChanged([PageRecord(key, 4096, metadata(1))], present))
        truth[tier] = truth[tier] | 1 << shard if present else truth[tier] & ~(1 << shard)
        change = index.changes[-1]
        assert not change.added_shards & change.removed_shards
        known[change.tier] = (known[change.tier] | change.added_shards) & ~change.removed_shards
        assert known == truth
