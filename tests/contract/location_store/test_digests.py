"""What every LocationStore promises of digests: they say what its entries say, whatever changed them."""

import secrets
from collections.abc import Sequence

import pytest

from kvpool.core.location_digest import RANGE_COUNT, bucket_of, fingerprint, holding, range_of
from kvpool_index.core.entries import EVERY_SHARD, GroupRead, NodeEntry, TierMasks, decode_value
from kvpool_index.ports import IndexStore
from tests.contract.location_store.conftest import Harness
from tests.contract.location_store.test_locations import GRID, KEYSPACE, change, open_stream

ALL = range(RANGE_COUNT)


async def made_of(store: IndexStore, ordinal: int, places: Sequence[tuple[bytes, bytes]]) -> dict[int, int]:
    """Digests made of what is read, by range."""
    found: dict[int, int] = {}
    for chunk, head in places:
        (value,) = await store.locations.read(KEYSPACE, [GroupRead(head, [chunk[:8]])])
        for entry in decode_value(value, GRID):
            if entry.ordinal == ordinal:
                held = holding(entry.shards, GRID)
                found[range_of(head)] = found.get(range_of(head), 0) ^ fingerprint(KEYSPACE + head + chunk[:8], held)
    return {number: digest for number, digest in found.items() if digest}


async def reported(store: IndexStore, ordinal: int) -> dict[int, int]:
    digests = await store.locations.digests(ordinal, ALL)
    return {number: digest for number, digest in zip(ALL, digests, strict=True) if digest}


async def entries(store: IndexStore, ordinal: int, first: int = 0, last: int = (1 << 16) - 1) -> set[NodeEntry]:
    return {entry async for part in store.locations.entries(ordinal, first, last) for entry in part}


@pytest.mark.slow
async def test_digests_say_what_the_entries_say(harness: Harness) -> None:
    store = harness.store
    one, other = await open_stream(store), await open_stream(store)
    places = [(secrets.token_bytes(16), secrets.token_bytes(16)) for _ in range(40)]
    masks: list[TierMasks] = [(0, GRID, 0), (1, 0, 7), (0, 0, GRID), (0, 3, GRID)]

    async def agree() -> None:
        for fence in (one, other):
            assert await reported(harness.peer, fence.ordinal) == await made_of(store, fence.ordinal, places)

    for fence in (one, other):
        changes = [change(fence.ordinal, *place, added=masks[number % 4]) for number, place in enumerate(places)]
        await store.locations.apply(fence, changes)
    await agree()
    await store.locations.apply(one, [change(one.ordinal, *place, removed=(1, 1, 1)) for place in places[:20]])
    await agree()
    await store.locations.remove([change(other.ordinal, *place, removed=EVERY_SHARD) for place in places[5:10]])
    await agree()
    async for _ in harness.peer.locations.drop(KEYSPACE, one.ordinal):
        await agree()
    assert await reported(store, one.ordinal) == {}
    assert await reported(store, other.ordinal) != {}
    assert await store.locations.digests(other.ordinal, []) == []


async def test_digests_can_be_corrected(harness: Harness) -> None:
    store, fence = harness.store, await open_stream(harness.store)
    place = (secrets.token_bytes(16), secrets.token_bytes(16))
    await store.locations.apply(fence, [change(fence.ordinal, *place, added=(0, 1, 0))])
    true = await reported(store, fence.ordinal)
    number = range_of(place[1])
    beside = (number + 1) % RANGE_COUNT
    wrong = {number: 5, beside: 6}
    assert await store.locations.correct_digests(fence.ordinal, {number: (true[number], 5), beside: (0, 6)}) == 2
    assert await reported(store, fence.ordinal) == wrong
    assert await store.locations.correct_digests(fence.ordinal, {number: (true[number], 7), beside: (0, 8)}) == 0
    assert await reported(store, fence.ordinal) == wrong, "they had changed since they were found wrong"
    assert await store.locations.correct_digests(fence.ordinal, {number: (5, true[number]), beside: (6, 0)}) == 2
    assert await reported(store, fence.ordinal) == true
    assert await store.locations.correct_digests(fence.ordinal, {}) == 0


async def test_all_chunks_are_walked_over_with_whom_they_name(harness: Harness) -> None:
    store = harness.store
    one, other = await open_stream(store), await open_stream(store)
    places = [(secrets.token_bytes(16), secrets.token_bytes(16)) for _ in range(60)]
    await store.locations.apply(one, [change(one.ordinal, *place, added=(0, 1, 0)) for place in places[:50]])
    await store.locations.apply(other, [change(other.ordinal, *place, added=(0, 1, 0)) for place in places[30:]])
    found = {each.entry: set(each.ordinals) async for part in harness.peer.locations.chunks() for each in part}
    assert found == {
        NodeEntry(KEYSPACE, head, chunk[:8]): ({one.ordinal} if number < 50 else set())
        | ({other.ordinal} if number >= 30 else set())
        for number, (chunk, head) in enumerate(places)
    }


@pytest.mark.slow
async def test_entries_of_a_node_are_found_by_bucket(harness: Harness) -> None:
    store = harness.store
    one, other = await open_stream(store), await open_stream(store)
    places = [(secrets.token_bytes(16), secrets.token_bytes(16)) for _ in range(60)]
    await store.locations.apply(one, [change(one.ordinal, *place, added=(0, 1, 0)) for place in places[:50]])
    await store.locations.apply(other, [change(other.ordinal, *place, added=(0, 1, 0)) for place in places[30:]])
    expected = {NodeEntry(KEYSPACE, head, chunk[:8]) for chunk, head in places[:50]}
    assert await entries(harness.peer, one.ordinal) == expected
    bucket = bucket_of(places[0][1])
    inside = {entry for entry in expected if bucket_of(entry.group_head) == bucket}
    assert await entries(store, one.ordinal, bucket, bucket) == inside
    half = {entry for entry in expected if bucket_of(entry.group_head) < 1 << 15}
    assert await entries(store, one.ordinal, 0, (1 << 15) - 1) == half
    assert await entries(store, 12345) == set()
