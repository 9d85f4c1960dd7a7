"""The map of what is on disk."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.cluster import PageMetadata
from kvpool.core.page import PageKey
from kvpool_pagestore.core.disk_map import DiskMap
from tests.fixtures.pagestore import KEYSPACE, metadata, page_key

SIZES = {0: 100, 1: 250}


def new_map() -> DiskMap:
    return DiskMap(lambda key: SIZES[key.shard])


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
    for number in range(4):
        disk.add(page_key(number), metadata(number))
        disk.add(page_key(number, shard=1), metadata(number))
    disk.touch(page_key(0))
    oldest = disk.oldest(400, lambda key: key == page_key(2, shard=1))
    assert [chunk.chunk_hash for chunk in oldest] == [page_key(1).chunk_hash, page_key(3).chunk_hash]
    assert oldest[0].keys == [page_key(1), page_key(1, shard=1)]


def test_a_keyspace_is_forgotten_as_a_whole() -> None:
    disk, other = new_map(), b"o" * 16
    disk.add(page_key(1), metadata(1))
    disk.add(page_key(1, keyspace=other), metadata(1))
    assert disk.remove_keyspace(KEYSPACE) == [page_key(1)]
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
            assert disk.remove(key) is (key in pages)
            pages.discard(key)
        assert disk.page_count == len(pages)
        assert disk.size_bytes == sum(SIZES[one.shard] for one in pages)
        assert {one for chunk in disk.chunks() for one in chunk.keys} == pages
        assert all((one in disk) for one in pages)
