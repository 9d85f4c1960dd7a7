"""What every LocationStore promises."""

import secrets

import pytest

from kvpool.core.cluster import ChainQuery, NodeInfo, NodeKind
from kvpool.core.errors import LeaseLost, StaleIncarnation
from kvpool_index.core.entries import EVERY_SHARD, ChunkOperation, GroupRead, Operation, TierMasks, decode_value
from kvpool_index.ports import IndexStore, StreamFence
from tests.contract.location_store.conftest import LEASE_MS, Harness

GRID = (1 << 8) - 1
KEYSPACE = bytes(range(16))
LONG_MS = 10 * LEASE_MS


def staging(shards: int) -> TierMasks:
    return (0, shards, 0)


def change(
    fence_ordinal: int,
    chunk: bytes,
    head: bytes,
    *,
    added: TierMasks = (0, 0, 0),
    removed: TierMasks = (0, 0, 0),
    grid: int = GRID,
    keyspace: bytes = KEYSPACE,
) -> ChunkOperation:
    operation = Operation(ordinal=fence_ordinal, full_shards=grid, added=added, removed=removed)
    return ChunkOperation(keyspace=keyspace, chunk_hash=chunk, group_head=head, operation=operation)


async def open_stream(store: IndexStore, node_id: bytes | None = None, ttl_ms: int = LONG_MS) -> StreamFence:
    info = NodeInfo(node_id=node_id or secrets.token_bytes(16), kind=NodeKind.PAGESTORE, endpoint="h:1")
    grant = await store.nodes.register(info, last_incarnation=0, lease_ttl_ms=ttl_ms)
    return await store.nodes.open_stream(info.node_id, grant.incarnation, grant.announce_epoch)


async def value_of(store: IndexStore, chunk: bytes, head: bytes, keyspace: bytes = KEYSPACE) -> bytes | None:
    (value,) = await store.locations.read(keyspace, [GroupRead(head, [chunk[:8]])])
    return value


async def shards_of(store: IndexStore, chunk: bytes, head: bytes) -> dict[int, TierMasks]:
    return {entry.ordinal: entry.shards for entry in decode_value(await value_of(store, chunk, head), GRID)}


async def test_reads_answer_in_order_across_groups(harness: Harness) -> None:
    store = harness.store
    fence = await open_stream(store)
    heads = [secrets.token_bytes(16) for _ in range(3)]
    chunks = [[secrets.token_bytes(16) for _ in range(16)] for _ in heads]
    wanted = [(head, chunk) for head, group in zip(heads, chunks, strict=True) for chunk in group[::3]]
    await store.locations.apply(fence, [change(fence.ordinal, chunk, head, added=staging(3)) for head, chunk in wanted])
    reads = [GroupRead(head, [chunk[:8] for chunk in group]) for head, group in zip(heads, chunks, strict=True)]
    values = await store.locations.read(KEYSPACE, reads)
    assert [value is not None for value in values] == [number % 3 == 0 for _ in heads for number in range(16)]
    assert len({value for value in values if value}) == 1, "equal locations are equal bytes"
    assert await store.locations.read(secrets.token_bytes(16), reads) == [None] * 48


async def test_chains_are_read_together_as_they_are_alone(harness: Harness) -> None:
    store = harness.store
    fence = await open_stream(store)
    chains = [b"".join(secrets.token_bytes(16) for _ in range(count)) for count in (1, 40, 0, 3, 1)]
    queries = [ChainQuery(keyspace=KEYSPACE, chunk_hashes=hashes) for hashes in chains]
    queries.append(
        ChainQuery(keyspace=KEYSPACE, chunk_hashes=chains[1][48:], first_chunk_index=3, group_head_hash=chains[1][:16])
    )
    places = [
        (hashes[at : at + 16], hashes[at - at % 256 :][:16])
        for hashes in chains[:4]
        for at in range(0, len(hashes), 32)
    ]
    await store.locations.apply(fence, [change(fence.ordinal, chunk, head, added=staging(3)) for chunk, head in places])
    together = await store.locations.read_chains(queries)
    assert [[value is not None for value in values] for values in together] == [
        [True],
        [True, False] * 20,
        [],
        [True, False, True],
        [False],
        [False, *[True, False] * 18],
    ]
    assert together[1] == await store.locations.read_chain(queries[1])
    assert await store.locations.read_chains(queries[2:3] * 2) == [[], []]


async def test_groups_that_have_a_chunk_are_listed(harness: Harness) -> None:
    store, other = harness.store, secrets.token_bytes(16)
    fence = await open_stream(store)
    heads = [secrets.token_bytes(16) for _ in range(40)]
    below = secrets.token_bytes(16)

    async def listed(keyspace: bytes) -> list[bytes]:
        return sorted({head async for some in harness.peer.locations.group_heads(keyspace) for head in some})

    assert await listed(KEYSPACE) == []
    added = [change(fence.ordinal, head, head, added=staging(1)) for head in heads]
    added += [change(fence.ordinal, below, head, added=staging(1)) for head in heads[:20]]
    added += [change(fence.ordinal, heads[0], heads[0], added=staging(1), keyspace=other)]
    await store.locations.apply(fence, added)
    assert (await listed(KEYSPACE), await listed(other)) == (sorted(heads), heads[:1])
    await store.locations.apply(fence, [change(fence.ordinal, head, head, removed=EVERY_SHARD) for head in heads])
    assert await listed(KEYSPACE) == sorted(heads[:20]), "the others have no chunk any more"
    await store.nodes.end(fence.node_id, fence.incarnation)
    assert await listed(KEYSPACE) == sorted(heads[:20]), "their node may come back"


async def test_a_large_batch_and_an_empty_one(harness: Harness) -> None:
    store = harness.store
    fence = await open_stream(store)
    places = [(secrets.token_bytes(16), secrets.token_bytes(16)) for _ in range(1100)]
    operations = [change(fence.ordinal, chunk, head, added=staging(GRID)) for chunk, head in places]
    states = await store.locations.apply(fence, operations)
    assert [(state.chunk_hash, state.group_head) for state in states] == places
    assert len({state.value for state in states}) == 1 and states[0].value
    stale = [change(fence.ordinal, chunk, head, removed=staging(GRID)) for chunk, head in places]
    assert all(state is not None and not state.value for state in await store.locations.remove(stale))
    assert await store.locations.apply(fence, []) == [] and await store.locations.remove([]) == []


async def test_shards_come_and_go_by_tier(harness: Harness) -> None:
    store, chunk, head = harness.store, secrets.token_bytes(16), secrets.token_bytes(16)
    fence = await open_stream(store)

    async def apply(added: TierMasks, removed: TierMasks) -> bytes:
        (state,) = await store.locations.apply(
            fence, [change(fence.ordinal, chunk, head, added=added, removed=removed)]
        )
        assert state.value == (await value_of(store, chunk, head) or b"")
        return state.value

    await apply(staging(0b0011), (0, 0, 0))
    assert await shards_of(store, chunk, head) == {fence.ordinal: (0, 0b0011, 0)}
    full = await apply((1 << 7, GRID ^ 0b0011, GRID), (0, 0, 0))
    assert len(full) == 5 + 8, "only the partial tier has a bitmap"
    (entry,) = decode_value(full, GRID)
    assert (entry.shards[0], entry.shards[1] & GRID, entry.shards[2] & GRID) == (1 << 7, GRID, GRID)
    await apply((0, 0, 0), (GRID, 0b1, 0))
    assert (await shards_of(store, chunk, head))[fence.ordinal][:2] == (0, GRID ^ 0b1)
    assert await apply((0, 0b1, 0), (0, GRID, GRID)) == b"", "a bit in both is removed"
    assert await value_of(store, chunk, head) is None


async def test_all_64_shards_are_distinguished(harness: Harness) -> None:
    store, chunk, head = harness.store, secrets.token_bytes(16), secrets.token_bytes(16)
    fence = await open_stream(store)
    grid, top = (1 << 64) - 1, 1 << 63
    await store.locations.apply(fence, [change(fence.ordinal, chunk, head, added=staging(top | 1), grid=grid)])
    assert await shards_of(store, chunk, head) == {fence.ordinal: (0, top | 1, 0)}
    await store.locations.apply(fence, [change(fence.ordinal, chunk, head, added=staging(grid), grid=grid)])
    await store.locations.apply(fence, [change(fence.ordinal, chunk, head, removed=staging(top), grid=grid)])
    assert await shards_of(store, chunk, head) == {fence.ordinal: (0, grid ^ top, 0)}


async def test_an_unknown_grid_keeps_plain_bitmaps(harness: Harness) -> None:
    store, chunk, head = harness.store, secrets.token_bytes(16), secrets.token_bytes(16)
    fence = await open_stream(store)
    await store.locations.apply(fence, [change(fence.ordinal, chunk, head, added=staging(GRID), grid=0)])
    assert await shards_of(store, chunk, head) == {fence.ordinal: (0, GRID, 0)}
    await store.locations.apply(fence, [change(fence.ordinal, chunk, head, removed=staging(1), grid=0)])
    assert await shards_of(store, chunk, head) == {fence.ordinal: (0, GRID ^ 1, 0)}


async def test_shards_beside_a_whole_chunk_are_neither_lost_nor_invented(harness: Harness) -> None:
    """A grid of several splits: a whole chunk is not every shard, and every shard is more than a whole chunk."""
    store, chunk, head = harness.store, secrets.token_bytes(16), secrets.token_bytes(16)
    fence = await open_stream(store)
    whole, every = 0b0001_0001, (1 << 64) - 1

    async def apply(added: int = 0, removed: int = 0, grid: int = whole) -> int:
        changed = change(fence.ordinal, chunk, head, added=staging(added), removed=staging(removed), grid=grid)
        (state,) = await store.locations.apply(fence, [changed])
        found = decode_value(state.value, whole)
        return found[0].shards[1] if found else 0

    assert await apply(added=whole) == whole
    assert await apply(added=0b0110) == whole | 0b0110
    assert await apply(added=every) == every
    assert await apply(removed=0b0110) == every & ~0b0110
    assert await apply(removed=every & ~whole) == whole
    assert await apply(grid=0) == whole, "by a replica that does not know the grid, for the time being"
    assert await apply(removed=0b1000, grid=0) == 0, "which shards are left cannot be said"
    assert await apply(added=0b0110) == 0b0110


async def test_nodes_do_not_disturb_each_other(harness: Harness) -> None:
    store, chunk, head = harness.store, secrets.token_bytes(16), secrets.token_bytes(16)
    fences = [await open_stream(store) for _ in range(5)]
    for number, fence in enumerate(fences):
        await store.locations.apply(fence, [change(fence.ordinal, chunk, head, added=staging(1 << number))])
    expected = {fence.ordinal: staging(1 << number) for number, fence in enumerate(fences)}
    assert await shards_of(store, chunk, head) == expected
    assert list(await shards_of(store, chunk, head)) == sorted(expected), "entries are ordered, so that they compare"
    gone = fences[2]
    await store.locations.apply(gone, [change(gone.ordinal, chunk, head, removed=EVERY_SHARD)])
    del expected[gone.ordinal]
    assert await shards_of(store, chunk, head) == expected


async def test_a_value_names_a_bounded_number_of_nodes(harness: Harness) -> None:
    store, chunk, head = harness.store, secrets.token_bytes(16), secrets.token_bytes(16)
    operations = [change(ordinal, chunk, head, added=staging(GRID)) for ordinal in range(1, 70)]
    await store.locations.remove(operations)
    assert len(await shards_of(store, chunk, head)) == 64


async def test_batches_are_idempotent_and_versions_grow(harness: Harness) -> None:
    store, chunk, head = harness.store, secrets.token_bytes(16), secrets.token_bytes(16)
    fence = await open_stream(store)
    add = [change(fence.ordinal, chunk, head, added=staging(0b11))]
    drop = [change(fence.ordinal, chunk, head, removed=staging(0b11))]
    (first,) = await store.locations.apply(fence, add)
    (again,) = await store.locations.apply(fence, add)
    assert again == first
    (gone,) = await store.locations.apply(fence, drop)
    assert gone.value == b"" and gone.version > first.version
    (back,) = await store.locations.apply(fence, add)
    assert back.version > gone.version, "also over a time in which no node had the chunk"


async def test_a_later_stream_fences_an_earlier_one(harness: Harness) -> None:
    store, chunk, other, head = harness.store, *(secrets.token_bytes(16) for _ in range(3))
    node_id = secrets.token_bytes(16)
    early = await open_stream(store, node_id)
    late = await store.nodes.open_stream(node_id, early.incarnation, (1 << 52))
    assert late.ordinal == early.ordinal and late.number > early.number
    await store.locations.apply(late, [change(late.ordinal, chunk, head, removed=staging(GRID))])
    with pytest.raises(LeaseLost):
        await store.locations.apply(early, [change(early.ordinal, chunk, head, added=staging(GRID))])
    with pytest.raises(LeaseLost):
        await store.locations.apply(early, [change(early.ordinal, other, head, added=staging(GRID))])
    assert await value_of(store, chunk, head) is None, "the group remembers the later stream, even when it is empty"
    assert await value_of(store, other, head) is None


async def test_a_newer_process_and_an_ended_lease_stop_a_stream(harness: Harness) -> None:
    store, chunk, head = harness.store, secrets.token_bytes(16), secrets.token_bytes(16)
    node_id = secrets.token_bytes(16)
    old = await open_stream(store, node_id)
    await open_stream(store, node_id, LEASE_MS)
    with pytest.raises(StaleIncarnation):
        await store.locations.apply(old, [change(old.ordinal, chunk, head, added=staging(1))])
    short = await open_stream(store, secrets.token_bytes(16), LEASE_MS)
    await harness.store.nodes.end(old.node_id, old.incarnation)
    await store.nodes.end(short.node_id, short.incarnation)
    with pytest.raises(LeaseLost):
        await store.locations.apply(short, [change(short.ordinal, chunk, head, added=staging(1))])


async def test_a_stream_outlives_no_lease(harness: Harness) -> None:
    store, chunk, head = harness.store, secrets.token_bytes(16), secrets.token_bytes(16)
    fence = await open_stream(store, ttl_ms=LEASE_MS)
    await harness.let_leases_end()
    with pytest.raises(LeaseLost):
        await store.locations.apply(fence, [change(fence.ordinal, chunk, head, added=staging(1))])


async def test_remove_returns_what_was_there(harness: Harness) -> None:
    store, chunk, head = harness.store, secrets.token_bytes(16), secrets.token_bytes(16)
    fence = await open_stream(store)
    await store.locations.apply(fence, [change(fence.ordinal, chunk, head, added=staging(0b11))])
    stale = [
        change(fence.ordinal, chunk, head, removed=staging(0b01)),
        change(fence.ordinal, chunk, head, removed=staging(0b100)),
        change(fence.ordinal ^ 1, chunk, head, removed=EVERY_SHARD),
        change(fence.ordinal, secrets.token_bytes(16), head, removed=EVERY_SHARD),
    ]
    states = await store.locations.remove(stale)
    assert [state is not None for state in states] == [True, False, False, False]
    assert await shards_of(store, chunk, head) == {fence.ordinal: staging(0b10)}
    (state,) = await store.locations.apply(fence, [change(fence.ordinal, chunk, head, added=staging(0b01))])
    assert decode_value(state.value, GRID)[0].shards == staging(0b11), (
        "the stream itself is not fenced by a stale report"
    )


@pytest.mark.parametrize("whole", [True, False])
async def test_drop_forgets_one_keyspace(harness: Harness, whole: bool) -> None:
    store = harness.store
    # Bytes that mean something in a pattern of SCAN.
    dropped, kept = b"*?[]\\^-" + secrets.token_bytes(9), b"*?[]\\^-" + secrets.token_bytes(9)
    mine, other = await open_stream(store), await open_stream(store)
    places = [(secrets.token_bytes(16), secrets.token_bytes(16)) for _ in range(40)]
    for fence in (mine, other):
        for keyspace in (dropped, kept):
            operations = [
                change(fence.ordinal, chunk, head, added=(GRID, GRID, 0b1), keyspace=keyspace) for chunk, head in places
            ]
            await store.locations.apply(fence, operations)
    states = [state async for step in store.locations.drop(dropped, None if whole else mine.ordinal) for state in step]
    assert {state.group_head for state in states} == {head for _, head in places} and len(states) == len(places)
    assert {state.chunk_hash[:8] for state in states} == {chunk[:8] for chunk, _ in places}
    for chunk, head in places:
        left = decode_value(await value_of(store, chunk, head, dropped), GRID)
        assert [entry.ordinal for entry in left] == ([] if whole else [other.ordinal])
        assert len(decode_value(await value_of(store, chunk, head, kept), GRID)) == 2
    again = [state async for step in store.locations.drop(dropped, None if whole else mine.ordinal) for state in step]
    assert again == []
