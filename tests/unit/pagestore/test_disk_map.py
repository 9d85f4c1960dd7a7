"""The map of what is on disk."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.cluster import PageMetadata
from kvpool.core.page import PageKey
from kvpool_pagestore.core.chunk_columns import FoundChunks
from kvpool_pagestore.core.disk_map import DiskMap
from kvpool_pagestore.core.events import PageEvents
from kvpool_pagestore.core.stored_pages import StoredPages
from tests.fixtures.pagestore import KEYSPACE, metadata, page_key

SIZES = {0: 100, 1: 250}


def new_map(now_us: Callable[[], int] = lambda: 0) -> DiskMap:
    return DiskMap(lambda key: SIZES[key.shard], PageEvents(), now_us)


def test_metadata_comes_back_as_it_was_given() -> None:
    given_metadata = PageMetadata(
        parent_hash=b"p" * 16,
        chunk_index=1 << 40,
        group_head_hash=b"g" * 16,
        ttl_ms=7,
        priority=-100,
        pinned_until_us=9,
    )
    disk = new_map()
    disk.add(page_key(1), given_metadata)
    assert disk.metadata(page_key(1)) == given_metadata
    assert disk.metadata(page_key(1, shard=1)) is None and disk.metadata(page_key(2)) is None


def test_chunks_go_by_their_last_use_and_those_in_use_are_passed_over() -> None:
    disk = new_map()
    for number in (0, 16, 32, 48):  # chains of one chunk each
        disk.add(page_key(number), metadata(number))
        disk.add(page_key(number, shard=1), metadata(number))
    disk.touch(page_key(0))
    oldest = disk.oldest(400, lambda key: key == page_key(32, shard=1))
    assert [chunk.chunk_hash for chunk in oldest] == [page_key(16).chunk_hash, page_key(48).chunk_hash]
    assert oldest[0].keys == [page_key(16), page_key(16, shard=1)]


def chosen(disk: DiskMap, free_bytes: int = 1, keyspaces: tuple[bytes, ...] | None = None) -> list[int]:
    """Chunk numbers that go."""
    chunks = disk.oldest(free_bytes, lambda key: False, keyspaces)
    return [chunk.metadata.chunk_index for chunk in chunks]


def test_the_end_of_a_chain_goes_first_whatever_the_order_in_which_its_chunks_came() -> None:
    disk = new_map()
    for number in (2, 0, 3, 1):
        disk.add(page_key(number), metadata(number))
    disk.touch(page_key(3))
    assert chosen(disk, 10**6) == [3, 2, 1, 0]


def test_a_chunk_that_is_being_read_keeps_the_chunks_before_it() -> None:
    disk = new_map()
    for number in range(4):
        disk.add(page_key(number), metadata(number))
    oldest = disk.oldest(10**6, lambda key: key == page_key(2))
    assert [chunk.chunk_hash for chunk in oldest] == [page_key(3).chunk_hash]


def test_a_chosen_chunk_that_was_kept_is_chosen_again() -> None:
    disk = new_map()
    disk.add(page_key(0), metadata(0))
    assert chosen(disk) == [0]
    assert chosen(disk) == [0]
    disk.remove((page_key(0),))
    assert chosen(disk) == []


def test_pinned_chunks_stay_until_the_pin_ends_and_expired_ones_go_first() -> None:
    now_us = [100]
    disk = new_map(lambda: now_us[0])
    for number in range(3):
        disk.add(page_key(number * 16), metadata(number * 16))
    disk.set_metadata(KEYSPACE, page_key(0).chunk_hash, replace(metadata(0), pinned_until_us=200))
    disk.set_metadata(KEYSPACE, page_key(32).chunk_hash, replace(metadata(32), expires_us=100, priority=100))
    assert chosen(disk, 10**6) == [32, 16]
    now_us[0] = 200
    assert set(chosen(disk, 10**6)) == {32, 16, 0}


def test_victims_can_be_of_some_keyspaces_only() -> None:
    disk, other = new_map(), b"o" * 16
    disk.add(page_key(0), metadata(0))
    disk.add(page_key(16, keyspace=other), metadata(16))
    assert chosen(disk, 10**6, (other,)) == [16]
    assert chosen(disk, 10**6, (b"x" * 16,)) == []


def test_a_chunk_is_forgotten_as_a_whole() -> None:
    disk, other = new_map(), b"o" * 16
    disk.add(page_key(1), metadata(1))
    disk.add(page_key(1, keyspace=other), metadata(1))
    disk.add(page_key(1, 1), metadata(1))
    (name,) = [name for name in disk.names() if name.startswith(KEYSPACE)]
    assert disk.remove_chunks([name]) == [(name, 0b11)]
    assert disk.remove_chunks([name]) == []
    assert page_key(1, keyspace=other) in disk and disk.page_count == 1


keys = st.builds(page_key, st.integers(0, 5), st.sampled_from([0, 1]))


@given(st.lists(st.tuples(st.booleans(), keys)))
def test_it_counts_as_a_set_of_pages_does(steps: list[tuple[bool, PageKey]]) -> None:
    disk, pages = new_map(), set[PageKey]()
    for adds, key in steps:
        if adds:
            assert disk.add(key, metadata(1)) is (key not in pages)
            pages.add(key)
        else:
            assert bool(disk.remove((key,))) is (key in pages)
            pages.discard(key)
        assert disk.page_count == len(pages)
        assert disk.size_bytes == sum(SIZES[one.shard] for one in pages)
        assert {one for chunk in disk.chunks() for one in chunk.keys} == pages
        assert all((one in disk) for one in pages)


def test_a_chunk_stays_as_long_as_that_page_of_it_which_is_to_stay_longest() -> None:
    disk = DiskMap(lambda key: 1, PageEvents(), lambda: 100)
    plain = PageMetadata(parent_hash=bytes(16), chunk_index=0, group_head_hash=bytes(16))
    for shard, kept in enumerate((plain, replace(plain, pinned_until_us=200), plain)):
        assert disk.add(PageKey(b"k" * 16, b"c" * 16, shard), kept)
    assert disk.oldest(1, lambda key: False) == [], "a page that was stored with a pin was given up"
    assert disk.metadata(PageKey(b"k" * 16, b"c" * 16, 2)) == replace(plain, pinned_until_us=200)


def test_what_a_scan_has_found_is_ranked_when_the_first_victim_is_needed() -> None:
    disk = DiskMap(lambda key: 1, PageEvents(), lambda: 0)
    keys = [PageKey(bytes(16), bytes([number]) * 16, 0) for number in range(1, 6)]
    parents = [bytes(16), *(key.chunk_hash for key in keys)]
    kept = [
        PageMetadata(parent_hash=parent, chunk_index=number, group_head_hash=bytes(16))
        for number, parent in enumerate(parents[:5])
    ]
    restore(disk, list(zip(keys, kept, strict=True)))
    assert disk.remove((keys[4],))
    disk.touch(keys[0])
    (victim,) = disk.oldest(1, lambda key: False)
    assert victim.chunk_hash == keys[3].chunk_hash, "the end of the chain"
    assert [chunk.chunk_hash for chunk in disk.oldest(4, lambda key: False)] == [
        key.chunk_hash for key in reversed(keys[:4])
    ]


@given(st.lists(st.tuples(keys, st.integers(0, 3)), unique_by=lambda page: page[0]), st.integers(1, 4))
def test_what_a_scan_finds_counts_as_what_was_added(pages: list[tuple[PageKey, int]], step: int) -> None:
    scanned, added = new_map(), new_map()
    kept = [(key, replace(metadata(1), pinned_until_us=until_us, prompt_tokens=7)) for key, until_us in pages]
    restore(scanned, kept, step)
    for key, asked in sorted(kept, key=lambda page: page[0].pack()):
        added.add(key, asked)
    assert list(scanned.chunks()) == list(added.chunks()) and list(scanned.places()) == list(added.places())
    assert (scanned.page_count, scanned.size_bytes) == (added.page_count, added.size_bytes)


def test_many_chunks_are_found_as_each_is() -> None:
    """Also among chunks that only others follow: those have a row, and nothing is kept beside it."""
    disk, pages = new_map(), [(page_key(number), metadata(number)) for number in range(1, 300, 2)]
    restore(disk, pages)
    disk.remove([page_key(41)])
    hashes = [page_key(number).chunk_hash for number in range(310)]
    each = [(one, *at) for one in hashes if (at := disk.location(KEYSPACE, one)) is not None]
    assert disk.locations(KEYSPACE, hashes) == each and len(each) == 149
    assert disk.locations(b"o" * 16, hashes) == [] == new_map().locations(KEYSPACE, hashes)
    removed = disk.remove_chunks([KEYSPACE + one for one in hashes])
    assert removed == [(KEYSPACE + one, shards) for one, shards, _ in each] and disk.page_count == 0


def restore(disk: DiskMap, pages: list[tuple[PageKey, PageMetadata]], step: int = 3) -> None:
    """As a start does, so many pages at a time."""
    chunks, ordered = FoundChunks(), sorted(pages, key=lambda page: page[0].pack())
    for start in range(0, len(ordered), step):
        chunks.add(StoredPages.of((key, SIZES[0], kept) for key, kept in ordered[start : start + step]))
    disk.restore(chunks)
    disk.count_restored(chunks)


@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 3)), max_size=24, unique_by=lambda one: one[0]
    ),
    st.booleans(),
)
def test_chunks_go_whatever_parents_and_positions_clients_name(
    claims: list[tuple[int, int, int]], is_restart: bool
) -> None:
    disk = new_map()
    pages = [
        (page_key(number), replace(metadata(number), parent_hash=page_key(parent).chunk_hash, chunk_index=index))
        for number, parent, index in claims
    ]
    if is_restart:
        restore(disk, pages)
    else:
        for page in pages:
            disk.add(*page)
    assert len(disk.oldest(10**6, lambda key: False)) == len(claims)


def test_two_chunks_that_name_each_other_as_parents_can_go() -> None:
    disk = new_map()
    for number, parent in ((1, 2), (2, 1)):
        disk.add(page_key(number), replace(metadata(number), parent_hash=page_key(parent).chunk_hash))
    assert len(disk.oldest(10**6, lambda key: False)) == 2


def test_chunks_whose_parents_a_client_made_a_circle_go_like_others() -> None:
    for numbers in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        for first_index in (0, 1, 5):
            disk = new_map()
            for number in numbers:
                kept = replace(
                    metadata(number),
                    parent_hash=page_key((number - 1) % 3).chunk_hash,
                    chunk_index=first_index + number,
                )
                disk.add(page_key(number), kept)
            assert sorted(chosen(disk, 10**6)) == [first_index, first_index + 1, first_index + 2]
            for number in numbers:
                disk.remove((page_key(number),))
            assert not list(disk.names())


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(-1, 4)), max_size=30))
def test_whatever_clients_say_of_parents_a_full_disk_can_be_emptied(chunks: list[tuple[int, int, int]]) -> None:
    disk = new_map()
    held: set[int] = set()
    for number, parent, index in chunks:
        if index < 0:
            disk.remove((page_key(number),))
            held.discard(number)
        else:
            disk.add(page_key(number), replace(metadata(0), parent_hash=page_key(parent).chunk_hash, chunk_index=index))
            held.add(number)
    assert len(disk.oldest(10**6, lambda key: False)) == len(held)


def test_a_circle_is_not_closed_by_a_chunk_that_comes_back_with_another_number() -> None:
    disk = new_map()
    below, above = page_key(1), page_key(2)
    disk.add(below, replace(metadata(0), parent_hash=above.chunk_hash, chunk_index=2))  # expects 1 of its parent
    for _ in range(2):
        disk.add(above, replace(metadata(0), parent_hash=below.chunk_hash, chunk_index=3))
        disk.remove((above,))
    disk.add(above, replace(metadata(0), parent_hash=below.chunk_hash, chunk_index=3))
    assert sorted(chosen(disk, 10**6)) == [2, 3]


def test_pages_out_of_order_are_refused_rather_than_kept_twice() -> None:
    chunks = FoundChunks()
    pages = [(page_key(number), SIZES[0], metadata(number)) for number in (1, 2, 3)]
    chunks.add(StoredPages.of(pages[1:]))
    with pytest.raises(ValueError, match="ascending"):
        chunks.add(StoredPages.of(pages[:1]))


@pytest.mark.parametrize("is_restart", [False, True])
def test_numbers_of_any_size_are_kept_as_they_are(is_restart: bool) -> None:
    disk, large = new_map(), replace(metadata(1), chunk_index=1 << 40, prompt_tokens=1 << 50)
    for kept in (large, metadata(2)):
        if is_restart:
            disk = new_map()
            restore(disk, [(page_key(1), kept)])
        else:
            disk.add(page_key(1), metadata(1))
            disk.set_metadata(page_key(1).keyspace, page_key(1).chunk_hash, kept)
        assert disk.metadata(page_key(1)) == kept


@pytest.mark.slow
def test_a_chunk_costs_few_bytes_however_many_were_evicted_before_it() -> None:
    rng, count, length = random.Random(1), 1024, 32
    disk = DiskMap(lambda key: 1, PageEvents(), lambda: 0)

    def add_chains(chunk_count: int) -> None:
        head = before = bytes(16)
        for number in range(chunk_count):
            index, chunk_hash = number % length, rng.randbytes(16)
            if not index:
                head, before = chunk_hash, bytes(16)
            kept = PageMetadata(parent_hash=before, chunk_index=index, group_head_hash=head)
            disk.add(PageKey(KEYSPACE, chunk_hash, 0), kept)
            before = chunk_hash

    tracemalloc.start()
    try:
        add_chains(count)
        for _ in range(3 * count // length):  # three times all there is
            disk.remove_chunks([chunk.name for chunk in disk.oldest(length, lambda key: False)])
            add_chains(length)
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert disk.page_count == count and disk.row_count <= count + length, "rows of evicted chunks are used again"
    assert size_bytes / count <= 200, "columns, policy, window and ghosts; a process has 250 bytes for all"
