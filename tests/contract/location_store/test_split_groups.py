"""What every LocationStore promises of groups with very many chunks, as below a first chunk that all chains share."""

import secrets
from collections.abc import Iterable

import pytest

from kvpool.core.cluster import ChainQuery
from kvpool.core.errors import InvalidRequest, LeaseLost
from kvpool.core.location_digest import PART_COUNT, PartSpan, SplitGroup, fingerprint, holding, part_of, range_of
from kvpool_index.core.entries import EVERY_SHARD, SPLIT_CHUNKS, NodeEntry, TierMasks
from kvpool_index.ports import IndexStore, StreamFence
from tests.contract.location_store.conftest import Harness
from tests.contract.location_store.test_digests import entries, reported
from tests.contract.location_store.test_locations import (
    GRID,
    KEYSPACE,
    change,
    open_stream,
    shards_of,
    staging,
    value_of,
)

MANY = 5000
STEP_MOST = 4096  # chunks in one step of a walk


async def fill(
    store: IndexStore, fence: StreamFence, head: bytes, chunks: Iterable[bytes], added: TierMasks = (0, GRID, 0)
) -> None:
    await store.locations.apply(fence, [change(fence.ordinal, chunk, head, added=added) for chunk in chunks])


async def split_groups(store: IndexStore, ordinal: int, number: int) -> dict[tuple[bytes, bytes], SplitGroup]:
    found: dict[tuple[bytes, bytes], SplitGroup] = {}
    after = b""
    while True:
        groups, after = await store.locations.split_groups(ordinal, number, after)
        assert len(groups) <= STEP_MOST // PART_COUNT * 16
        found.update(((group.keyspace, group.group_head), group) for group in groups)
        if not after:
            return found


def part_digests(head: bytes, held: dict[bytes, TierMasks]) -> list[int]:
    """What the digests of a group's parts should be."""
    found = [0] * PART_COUNT
    for chunk, shards in held.items():
        found[part_of(chunk)] ^= fingerprint(KEYSPACE + head + chunk[:8], holding(shards, GRID))
    return found


async def check_digests(store: IndexStore, ordinal: int, head: bytes, held: dict[bytes, TierMasks]) -> None:
    """The digests of a split group, and of its range, in which nothing else is, say what is held."""
    found = part_digests(head, held)
    groups = await split_groups(store, ordinal, range_of(head))
    assert groups == {(KEYSPACE, head): SplitGroup(KEYSPACE, head, found)}
    whole = 0
    for digest in found:
        whole ^= digest
    assert await reported(store, ordinal) == ({range_of(head): whole} if whole else {})


async def test_chunks_of_a_split_group_are_read_and_changed_like_others(harness: Harness) -> None:
    store, head = harness.store, secrets.token_bytes(16)
    fence = await open_stream(store)
    conversations = [[secrets.token_bytes(16) for _ in range(15)] for _ in range(MANY // 15)]
    await fill(store, fence, head, [head])
    for at in range(0, len(conversations), 50):
        await fill(store, fence, head, [chunk for chunks in conversations[at : at + 50] for chunk in chunks])
    later = [secrets.token_bytes(16) for _ in range(20)]
    await fill(store, fence, later[0], later[:16])
    await fill(store, fence, later[16], later[16:])
    chains = [b"".join([head, *chunks, *later]) for chunks in conversations[::40]]
    queries = [ChainQuery(keyspace=KEYSPACE, chunk_hashes=hashes) for hashes in chains]
    inside = ChainQuery(keyspace=KEYSPACE, chunk_hashes=chains[0][80:], first_chunk_index=5, group_head_hash=head)
    unknown = ChainQuery(keyspace=KEYSPACE, chunk_hashes=head + secrets.token_bytes(240))
    *found, partly, none = await harness.peer.locations.read_chains([*queries, inside, unknown])
    assert all(len(values) == 36 and all(values) for values in found)
    assert len(partly) == 31 and all(partly)
    assert [value is not None for value in none] == [True] + [False] * 15
    for query in (*queries[:2], inside, unknown):
        assert [await store.locations.read_chain(query)] == await store.locations.read_chains([query])

    gone, back, changed = conversations[0][:3]
    version = 0
    for operation in (
        change(fence.ordinal, gone, head, removed=EVERY_SHARD),
        change(fence.ordinal, back, head, removed=EVERY_SHARD),
        change(fence.ordinal, back, head, added=(0, 1, 0)),
        change(fence.ordinal, changed, head, added=(0, 0, 0b11)),
    ):
        (state,) = await store.locations.apply(fence, [operation])
        assert state.version > version, "of the whole group"
        version = state.version
    assert await value_of(store, gone, head) is None
    assert await shards_of(store, back, head) == {fence.ordinal: (0, 1, 0)}
    assert await shards_of(store, changed, head) == {fence.ordinal: (0, GRID, 0b11)}
    assert (await store.locations.apply(fence, [operation]))[0] == state, "once more changes nothing"


async def test_a_group_is_split_when_it_is_too_large(harness: Harness) -> None:
    store, head = harness.store, secrets.token_bytes(16)
    fence = await open_stream(store)
    chunks = [secrets.token_bytes(16) for _ in range(SPLIT_CHUNKS + 1)]
    span = PartSpan(KEYSPACE, head, part_of(chunks[0]))
    await fill(store, fence, head, chunks[:SPLIT_CHUNKS])
    assert await split_groups(store, fence.ordinal, range_of(head)) == {}
    assert await store.locations.part_digest(fence.ordinal, span) is None
    await fill(store, fence, head, chunks[SPLIT_CHUNKS:])
    await check_digests(store, fence.ordinal, head, dict.fromkeys(chunks, staging(GRID)))
    digests = part_digests(head, dict.fromkeys(chunks, staging(GRID)))
    assert await store.locations.part_digest(fence.ordinal, span) == digests[span.part]
    assert await store.locations.part_digest(fence.ordinal + 1, span) == 0
    assert await split_groups(store, fence.ordinal, range_of(head) ^ 1) == {}


@pytest.mark.slow
async def test_digests_of_parts_say_what_the_entries_say(harness: Harness) -> None:
    store, head = harness.store, secrets.token_bytes(16)
    one, other = await open_stream(store), await open_stream(store)
    chunks = [secrets.token_bytes(16) for _ in range(MANY)]
    masks: list[TierMasks] = [(0, GRID, 0), (1, 0, 7), (0, 0, GRID), (0, 3, GRID)]
    held: dict[StreamFence, dict[bytes, TierMasks]] = {one: {}, other: {}}
    for at in range(0, MANY, 500):  # some are there before the group is split, and most come after
        for fence, shift in ((one, 0), (other, 1)):
            for kind in range(4):
                some = chunks[at + kind : at + 500 : 4]
                await fill(store, fence, head, some, masks[(kind + shift) % 4])
                held[fence].update(dict.fromkeys(some, masks[(kind + shift) % 4]))
    for fence in (one, other):
        await check_digests(harness.peer, fence.ordinal, head, held[fence])
    for chunk in chunks[:400:4]:
        assert await shards_of(store, chunk, head) == {one.ordinal: masks[0], other.ordinal: masks[1]}

    gone = chunks[:300]
    await store.locations.apply(one, [change(one.ordinal, chunk, head, removed=EVERY_SHARD) for chunk in gone])
    await store.locations.remove([change(other.ordinal, chunk, head, removed=(0, 0, GRID)) for chunk in chunks[:4]])
    for chunk in gone:
        del held[one][chunk]
    for number, chunk in enumerate(chunks[:4]):
        gpu, stage, _ = masks[(number + 1) % 4]
        held[other][chunk] = (gpu, stage, 0)
    for fence in (one, other):
        await check_digests(harness.peer, fence.ordinal, head, held[fence])


@pytest.mark.slow
async def test_a_split_group_is_walked_over_in_steps(harness: Harness) -> None:
    store, head = harness.store, secrets.token_bytes(16)
    one, other = await open_stream(store), await open_stream(store)
    chunks = [secrets.token_bytes(16) for _ in range(MANY)]
    await fill(store, one, head, chunks)
    await fill(store, other, head, chunks[:100])
    small = [secrets.token_bytes(16) for _ in range(16)]
    await fill(store, one, small[0], small)
    expected = {NodeEntry(KEYSPACE, head, chunk[:8]) for chunk in chunks}
    beside = {NodeEntry(KEYSPACE, small[0], chunk[:8]) for chunk in small}
    named: dict[NodeEntry, list[int]] = {}
    async for step in harness.peer.locations.chunks():
        assert len(step) <= STEP_MOST
        named.update((each.entry, list(each.ordinals)) for each in step)
    assert named.keys() == expected | beside
    assert sum(other.ordinal in ordinals for ordinals in named.values()) == 100

    assert await entries(store, one.ordinal) == beside, "what is in parts is named part by part"
    listed = {each async for some in store.locations.group_heads(KEYSPACE) for each in some}
    assert listed == {head, small[0]}
    part = part_of(chunks[0])
    found = {
        entry
        async for step in store.locations.part_entries(other.ordinal, PartSpan(KEYSPACE, head, part))
        for entry in step
    }
    assert found == {NodeEntry(KEYSPACE, head, chunk[:8]) for chunk in chunks[:100] if part_of(chunk) == part}
    span = PartSpan(KEYSPACE, small[0], part_of(small[3]))
    found = {entry async for step in store.locations.part_entries(one.ordinal, span) for entry in step}
    assert found == {entry for entry in beside if entry.field[0] == span.part}, "also of a group that is not split"


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.slow
async def test_a_split_group_is_dropped_in_steps(harness: Harness, whole: bool) -> None:
    store, head = harness.store, secrets.token_bytes(16)
    mine, other = await open_stream(store), await open_stream(store)
    chunks = [secrets.token_bytes(16) for _ in range(MANY)]
    for fence in (mine, other):
        await fill(store, fence, head, chunks)
    dropped: list[bytes] = []
    async for step in harness.peer.locations.drop(KEYSPACE, None if whole else mine.ordinal):
        assert len(step) <= STEP_MOST
        dropped += [state.chunk_hash[:8] for state in step]
    assert sorted(dropped) == sorted(chunk[:8] for chunk in chunks)
    assert await reported(store, mine.ordinal) == {}
    assert (await reported(store, other.ordinal) == {}) is whole
    if whole:
        assert await split_groups(store, mine.ordinal, range_of(head)) == {}
        again = [secrets.token_bytes(16) for _ in range(3)]
        await fill(store, mine, head, again)
        assert await shards_of(store, again[1], head) == {mine.ordinal: staging(GRID)}
        named = {each.entry.field async for step in store.locations.chunks() for each in step}
        assert named == {chunk[:8] for chunk in again}
    else:
        await check_digests(store, other.ordinal, head, dict.fromkeys(chunks, staging(GRID)))


async def test_the_streams_of_many_nodes_are_fenced_in_one_group(harness: Harness) -> None:
    store, head = harness.store, secrets.token_bytes(16)
    node_ids = [secrets.token_bytes(16) for _ in range(40)]
    early = [await open_stream(store, node_id) for node_id in node_ids]
    late = [
        await store.nodes.open_stream(node_id, fence.incarnation, 1 << 52)
        for node_id, fence in zip(node_ids, early, strict=True)
    ]
    for chunk_count in (1, SPLIT_CHUNKS):
        for fence in late:
            await fill(store, fence, head, [secrets.token_bytes(16)])
        chunk = secrets.token_bytes(16)
        for fence in early:
            with pytest.raises(LeaseLost):
                await fill(store, fence, head, [chunk])
        assert await value_of(store, chunk, head) is None
        await fill(store, late[0], head, [secrets.token_bytes(16) for _ in range(chunk_count)])
    assert len(await split_groups(store, 0, range_of(head))) == 1


async def test_digests_of_parts_can_be_corrected(harness: Harness) -> None:
    store, head = harness.store, secrets.token_bytes(16)
    fence = await open_stream(store)
    chunks = [secrets.token_bytes(16) for _ in range(SPLIT_CHUNKS + 1)]
    span = PartSpan(KEYSPACE, head, part_of(chunks[0]))
    await fill(store, fence, head, chunks[:10])
    assert not await store.locations.correct_part_digest(fence.ordinal, span, 0, 5), "it is not split"
    await fill(store, fence, head, chunks[10:])
    held = dict.fromkeys(chunks, staging(GRID))
    true = part_digests(head, held)[span.part]
    number = range_of(head)
    whole = (await reported(store, fence.ordinal))[number]
    assert not await store.locations.correct_part_digest(fence.ordinal, span, true ^ 1, 5), "it has changed"
    await check_digests(store, fence.ordinal, head, held)
    for before, after in ((true, 5), (5, 0), (0, 1 << 63)):
        assert await store.locations.correct_part_digest(fence.ordinal, span, before, after)
        assert await store.locations.part_digest(fence.ordinal, span) == after
        assert await reported(store, fence.ordinal) == {number: whole ^ true ^ after}
    assert await store.locations.correct_part_digest(fence.ordinal, span, 1 << 63, true)
    await check_digests(store, fence.ordinal, head, held)


@pytest.mark.slow
async def test_split_groups_of_a_range_are_named_some_at_a_time(harness: Harness) -> None:
    store, fence = harness.store, await open_stream(harness.store)
    heads = [secrets.token_bytes(14) + b"\x12\x34" for _ in range(12)]
    for head in heads:
        await fill(store, fence, head, [secrets.token_bytes(16) for _ in range(SPLIT_CHUNKS + 1)])
    found = await split_groups(store, fence.ordinal, range_of(heads[0]))
    assert found.keys() == {(KEYSPACE, head) for head in heads}
    assert len({tuple(group.digests) for group in found.values()}) == len(heads)


async def test_a_continuation_that_is_none_is_refused_or_ends(harness: Harness) -> None:
    fence = await open_stream(harness.store)
    for after in (b"x", b"-1", b"9" * 20, b"9" * 40):
        try:
            assert await harness.store.locations.split_groups(fence.ordinal, 0, after) == ([], b"")
        except InvalidRequest:
            assert harness.store.kind == "redis"
