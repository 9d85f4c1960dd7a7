"""Chunks of windows and of recurrent states stand alone in eviction, and those that prompts have passed go first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool.core.cluster import PageMetadata
from kvpool.core.geometry import AttentionKind, OpaqueLayout, PayloadKind
from kvpool.core.keyspace import KeyspaceSpec, encode_keyspace, keyspace_id
from kvpool.core.page import PageKey
from kvpool_pagestore.core.chain_links import ALL_IN_CHAINS, ChainLink, ChainLinks
from kvpool_pagestore.core.chunk_columns import FoundChunks
from kvpool_pagestore.core.disk_map import DiskMap
from kvpool_pagestore.core.events import PageEvents
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.core.page_table import Grant
from kvpool_pagestore.core.segments import SegmentTable
from kvpool_pagestore.core.slots import PageRecord, Slot, SlotState
from kvpool_pagestore.core.stored_pages import StoredPages
from tests.fixtures.pagestore import (
    PAGE_BYTES,
    SPEC,
    TENANT,
    chunk_hash,
    fill_page,
    metadata,
    new_world,
    page_key,
    running_engine,
)
from tests.fixtures.pagestore_calls import open_session

CHUNKS = 12
WINDOW = replace(SPEC.group, attention=AttentionKind.GROUPED_WINDOW, window_tokens=2 * SPEC.chunk_tokens)
UNIFORM = replace(WINDOW, attention=AttentionKind.SLIDING_WINDOW)
STATE = replace(SPEC.group, attention=AttentionKind.STATE_SPACE)
OPAQUE = OpaqueLayout("vllm", "state", "", SPEC.chunk_tokens, 64)
SPECS = {
    "full": SPEC,
    "uniform": replace(SPEC, groups=(UNIFORM,)),
    "window": replace(SPEC, groups=(WINDOW,)),
    "pages": replace(SPEC, groups=(replace(WINDOW, pages=3),)),
    "state": replace(SPEC, groups=(STATE,), payload=PayloadKind.OPAQUE, opaque=OPAQUE),
}


def id_of(spec: KeyspaceSpec) -> bytes:
    return keyspace_id(encode_keyspace(TENANT, spec))


WINDOWS = id_of(SPECS["window"])


def links() -> ChainLinks:
    book = KeyspaceBook()
    for spec in SPECS.values():
        book.remember(encode_keyspace(TENANT, spec))
    return ChainLinks(book)


def of_prompt(number: int, chunks: int = CHUNKS) -> PageMetadata:
    """A chunk of a prompt that ends a little after so many chunks."""
    return replace(metadata(number), prompt_tokens=chunks * SPEC.chunk_tokens + 5)


@pytest.mark.parametrize(("name", "alone"), [("full", False), ("uniform", False), ("window", True), ("state", True)])
def test_chunks_that_are_read_without_those_before_them_stand_alone(name: str, alone: bool) -> None:
    keyspace = id_of(SPECS[name])
    assert links().stand_alone(keyspace) is alone
    assert links().find(keyspace, of_prompt(3)).parent == (None if alone else chunk_hash(2))
    assert links().find(keyspace, of_prompt(0)).parent is None
    assert ALL_IN_CHAINS.find(keyspace, of_prompt(3)) == ChainLink(chunk_hash(2), False), "it is not known"


def test_a_window_chunk_is_passed_where_its_prompt_goes_on_for_two_windows() -> None:
    passed = [links().find(WINDOWS, of_prompt(number)).is_passed for number in range(CHUNKS + 3)]
    assert passed == [True] * (CHUNKS - 4) + [False] * 7, "of 2 chunks a window; generated ones are not passed"
    assert not links().find(WINDOWS, metadata(3)).is_passed, "the prompt's length is not known"
    assert not any(links().find(id_of(SPECS[name]), of_prompt(0)).is_passed for name in ("full", "uniform", "state"))


def test_all_pages_of_a_chunk_are_passed_together() -> None:
    passed = [links().find(id_of(SPECS["pages"]), of_prompt(number)).is_passed for number in range(3 * CHUNKS)]
    assert passed == [True] * 3 * (CHUNKS - 4) + [False] * 3 * 4


ENDS = (*range(8, CHUNKS), *range(8))
"""The end of the prompt comes first: an older use alone would let it go first."""


def on_disk(disk: DiskMap, *, used: int = -1) -> DiskMap:
    for number in ENDS:
        disk.add(PageKey(WINDOWS, chunk_hash(number), 0), of_prompt(number), is_used=number == used)
    return disk


def go(disk: DiskMap, count: int) -> list[int]:
    return [chunk.metadata.chunk_index for chunk in disk.oldest(count, lambda key: False)]


def test_on_disk_passed_chunks_go_first_and_the_end_of_the_prompt_last() -> None:
    disk = on_disk(DiskMap(lambda key: 1, PageEvents(), lambda: 0, links()))
    assert go(disk, CHUNKS) == list(range(CHUNKS))
    assert go(on_disk(DiskMap(lambda key: 1, PageEvents(), lambda: 0)), 3) == [11, 10, 9], "in a chain"
    given_back = on_disk(DiskMap(lambda key: 1, PageEvents(), lambda: 0, links()))
    assert go(given_back, 1) == [0]
    assert go(given_back, CHUNKS)[-1] == 0, (
        "what was chosen and not removed comes back as used just now, after no other"
    )


def test_a_passed_chunk_that_was_read_stays_as_any_other() -> None:
    disk = on_disk(DiskMap(lambda key: 1, PageEvents(), lambda: 0, links()))
    disk.touch(PageKey(WINDOWS, chunk_hash(0), 0))
    assert go(disk, CHUNKS)[-1] == 0
    before = on_disk(DiskMap(lambda key: 1, PageEvents(), lambda: 0, links()), used=2)  # it was read in staging
    assert go(before, CHUNKS)[-1] == 2


def test_chunks_stand_alone_after_a_restart_too() -> None:
    found = FoundChunks()
    rows = sorted((PageKey(WINDOWS, chunk_hash(number), 0), 1, of_prompt(number)) for number in range(CHUNKS))
    found.add(StoredPages.of(rows))
    disk = DiskMap(lambda key: 1, PageEvents(), lambda: 0, links())
    disk.restore(found)
    disk.count_restored(found)
    disk.touch(PageKey(WINDOWS, chunk_hash(CHUNKS - 1), 0))
    assert go(disk, 1) == [0], "no chunk after it keeps it"
    assert go(disk, CHUNKS)[-2:] == [CHUNKS - 1, 0]


class Staging:
    """Pages of one window's keyspace in an arena of one segment of 16 slots."""

    def __init__(self) -> None:
        self.evicted: list[int] = []
        self.space = SegmentTable(
            capacity_bytes=1 << 16,
            segment_bytes=1 << 16,
            first_segment_id=1,
            on_evict=lambda slot: self.evicted.append(slot.page.metadata.chunk_index),
            now_us=lambda: 0,
            links=links(),
        )
        segment = self.space.plan_segment(TENANT, 4096)
        assert segment is not None
        self.space.segment_made(segment)

    def page(self, number: int, *, chunks: int = CHUNKS, pins: int = 0) -> Slot:
        slot = self.space.allocate(TENANT, 4096)
        assert isinstance(slot, Slot)
        self.space.occupy(slot, SlotState.READY)
        slot.record = PageRecord(PageKey(WINDOWS, chunk_hash(number), 0), 4096, of_prompt(number, chunks))
        slot.pins = pins
        self.space.update_evictable(slot)
        slot.pins = 0
        self.space.update_evictable(slot)
        return slot


def test_in_staging_passed_chunks_make_room_for_other_prompts() -> None:
    staging = Staging()
    for number in ENDS:
        staging.page(number)
    for number in range(100, 112):  # of the end of another prompt
        staging.page(number, chunks=112)
    assert staging.evicted == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_page_that_comes_for_a_reader_is_not_passed() -> None:
    staging = Staging()
    staging.page(0, pins=1)
    for number in range(1, CHUNKS):
        staging.page(number)
    for number in range(100, 108):
        staging.page(number, chunks=108)
    assert staging.evicted == [1, 2, 3, 4]


@pytest.mark.parametrize(("name", "gone"), [("window", [0, 1, 2]), ("full", [])])
async def test_a_pagestore_gives_up_passed_chunks_of_windows_first(name: str, gone: list[int]) -> None:
    keyspace = id_of(SPECS[name])
    with new_world(disk=False) as world:
        async with running_engine(world) as running:
            peer = await open_session(running, keyspaces=((keyspace, SPECS[name]),))
            slots = running.config.arena_bytes // running.config.segment_bytes * 8

            async def store(number: int, chunks: int) -> None:
                record = PageRecord(page_key(number, keyspace=keyspace), PAGE_BYTES, of_prompt(number, chunks))
                (grant,) = await running.engine.pages.reserve(peer, [record])
                assert isinstance(grant, Grant)
                fill_page(running.engine.pages.view(grant), record.key)
                assert await running.engine.pages.commit(peer, [grant.lease_id]) == [None]

            for number in (*range(slots - 4, slots), *range(slots - 4)):
                await store(number, slots)
            for number in range(1000, 1003):
                await store(number, 1003)
            table = running.engine.tiers.staging.table
            left = set(table.ready_chunks(keyspace))
            assert [number for number in range(slots - 4) if chunk_hash(number) not in left] == gone
            assert len(left) == slots
