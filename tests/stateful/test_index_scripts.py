"""Redis's script and the in-memory store do the same to the same bytes, whatever the history."""

import asyncio
import hashlib
import secrets

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvpool.core.cluster import ALL_SHARDS, NodeInfo, NodeKind
from kvpool.core.errors import LeaseLost
from kvpool.core.location_digest import range_of
from kvpool.testing import ManualClock
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.adapters.redis_store import RedisIndexStore
from kvpool_index.core.entries import SPLIT_CHUNKS, ChunkOperation, GroupRead, Operation, TierMasks
from kvpool_index.ports import IndexStore, StreamFence
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.redis_server import RedisServer
from tests.fixtures.redis_server import redis_server as redis_server
from tests.fixtures.redis_topologies import RedisCluster, RedisSentinels, facts
from tests.fixtures.redis_topologies import redis_cluster as redis_cluster
from tests.fixtures.redis_topologies import redis_sentinels as redis_sentinels

KEYSPACE, HEAD = b"k" * 16, b"h" * 16
CHUNKS = [bytes([number]) * 16 for number in range(3)]
FILLING = [hashlib.sha256(b"%d" % number).digest()[:16] for number in range(SPLIT_CHUNKS + 1)]
GRIDS = [0b1, 0b1001001, 0xFF, 1 << 63 | 1, ALL_SHARDS, 0]

bitmaps = st.one_of(
    st.just(0), st.sampled_from(GRIDS), st.just(ALL_SHARDS), st.integers(0, 0xFF), st.integers(0, ALL_SHARDS)
)
tier_masks = st.tuples(bitmaps, bitmaps, bitmaps)
steps = st.lists(
    st.tuples(
        st.integers(1, 4),  # node
        st.sampled_from(CHUNKS),
        tier_masks,
        tier_masks,
        st.sampled_from(["apply", "apply", "remove", "reopen", "late"]),
        st.booleans(),  # whether the replica that is asked knows the grid
    ),
    max_size=15,
)

History = list[tuple[int, bytes, TierMasks, TierMasks, str, bool]]
Batch = list[tuple[int, bytes, TierMasks, TierMasks]]
Batches = list[tuple[Batch, bool]]  # each with whether it is of removals


class Side:
    """One of the two stores, with streams of four nodes. The ordinals of its nodes are mapped to the nodes' numbers."""

    def __init__(self, store: IndexStore) -> None:
        self.store = store
        self.epochs: dict[int, int] = {}
        self.streams: dict[int, list[StreamFence]] = {}

    async def open(self, number: int) -> StreamFence:
        info = NodeInfo(node_id=bytes([number]) * 16, kind=NodeKind.PAGESTORE, endpoint="h:1", incarnation=10**6)
        if number not in self.streams:
            granted = await self.store.nodes.register(info, last_incarnation=0, lease_ttl_ms=100_000)
            self.epochs[number], self.streams[number] = granted.announce_epoch, []
        fence = await self.store.nodes.open_stream(info.node_id, 10**6, self.epochs[number])
        self.streams[number].append(fence)
        return fence

    async def step(
        self,
        number: int,
        chunk: bytes,
        added: tuple[int, int, int],
        removed: tuple[int, int, int],
        kind: str,
        grid: int,
    ) -> object:
        """What the step answered, without what differs between stores: versions and ordinals."""
        if number not in self.streams or kind == "reopen":
            await self.open(number)
        fence = self.streams[number][0 if kind == "late" else -1]
        # Numbers stand in for ordinals, so that both stores keep the same bytes.
        operation = Operation(
            ordinal=number, full_shards=grid, added=(0, 0, 0) if kind == "remove" else added, removed=removed
        )
        each = ChunkOperation(keyspace=KEYSPACE, chunk_hash=chunk, group_head=HEAD, operation=operation)
        if kind == "remove":
            (removed_state,) = await self.store.locations.remove([each])
            return removed_state.value if removed_state is not None else None
        try:
            (state,) = await self.store.locations.apply(fence, [each])
        except LeaseLost:
            return "fenced"
        return state.value

    async def fill(self) -> None:
        """Make the group one that is split. Its first chunks are of all nodes."""
        for number, chunks in ((2, FILLING[:40]), (3, FILLING[:40]), (1, FILLING)):
            await self.store.locations.remove(
                [
                    ChunkOperation(
                        keyspace=KEYSPACE,
                        chunk_hash=chunk,
                        group_head=HEAD,
                        operation=Operation(ordinal=number, full_shards=0, added=(0, number, at % 3)),
                    )
                    for at, chunk in enumerate(chunks)
                ]
            )

    async def digests(self) -> list[object]:
        """Of the range, and of the parts if the group is split."""
        found: list[object] = []
        for number in range(1, 5):
            found.append(await self.store.locations.digests(number, [range_of(HEAD)]))
            found.append(await self.store.locations.split_groups(number, range_of(HEAD), b""))
        return found

    async def values(self) -> list[bytes | None]:
        return await self.store.locations.read(KEYSPACE, [GroupRead(HEAD, [chunk[:8] for chunk in CHUNKS])])


def compare(url: str, history: History, grid: int, *, is_split: bool = False) -> None:
    """Take both stores through a history. is_split: the group has very many other chunks."""

    async def both() -> None:
        memory = Side(MemoryIndexStore(ManualClock()))
        real = Side(RedisIndexStore(url, timeout_s=PATIENCE_S, key_prefix=secrets.token_hex(8)))
        try:
            if is_split:
                await memory.fill()
                await real.fill()
                assert await real.digests() == await memory.digests()
            for number, chunk, added, removed, kind, is_known in history:
                known = grid if is_known else 0
                expected = await memory.step(number, chunk, added, removed, kind, known)
                assert await real.step(number, chunk, added, removed, kind, known) == expected
                assert await real.values() == await memory.values()
                assert await real.digests() == await memory.digests()
        finally:
            await real.store.close()

    asyncio.run(both())


@settings(max_examples=80)
@given(history=steps, grid=st.sampled_from(GRIDS))
@pytest.mark.slow
def test_the_script_does_what_the_reference_does(redis_server: RedisServer, history: History, grid: int) -> None:
    compare(redis_server.url, history, grid)


@settings(max_examples=15)
@given(history=steps, grid=st.sampled_from(GRIDS))
@pytest.mark.slow
def test_the_script_does_so_to_a_split_group(redis_server: RedisServer, history: History, grid: int) -> None:
    compare(redis_server.url, history, grid, is_split=True)


@settings(max_examples=15)
@given(history=steps, grid=st.sampled_from(GRIDS))
@pytest.mark.slow
def test_the_script_does_so_behind_sentinels(redis_sentinels: RedisSentinels, history: History, grid: int) -> None:
    compare(redis_sentinels.url, history, grid)


@settings(max_examples=30)
@given(history=steps, grid=st.sampled_from(GRIDS))
@pytest.mark.slow
def test_the_script_does_so_on_a_cluster(redis_cluster: RedisCluster, history: History, grid: int) -> None:
    compare(redis_cluster.url, history, grid)


changes = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from(CHUNKS), tier_masks, tier_masks), min_size=1, max_size=8
)
batches = st.lists(st.tuples(changes, st.booleans()), max_size=8)


def compare_batches(url: str, history: Batches, grid: int, *, is_split: bool) -> None:
    """Take both stores through batches: of one node on its stream, or removals of several nodes."""

    def operation(number: int, chunk: bytes, added: TierMasks, removed: TierMasks) -> ChunkOperation:
        made = Operation(ordinal=number, full_shards=grid, added=added, removed=removed)
        return ChunkOperation(keyspace=KEYSPACE, chunk_hash=chunk, group_head=HEAD, operation=made)

    async def step(side: Side, batch: Batch, is_removal: bool) -> list[object]:
        if is_removal:
            removals = [operation(number, chunk, (0, 0, 0), removed) for number, chunk, _, removed in batch]
            states = await side.store.locations.remove(removals)
            return [state.value if state is not None else None for state in states]
        fence = side.streams[batch[0][0]][-1]
        added = [operation(batch[0][0], chunk, added, removed) for _, chunk, added, removed in batch]
        versions: dict[bytes, int] = {}
        for state in (found := await side.store.locations.apply(fence, added)):
            assert state.version >= versions.get(state.chunk_hash, 0)
            versions[state.chunk_hash] = state.version
        return [state.value for state in found]

    async def both() -> None:
        memory = Side(MemoryIndexStore(ManualClock()))
        real = Side(RedisIndexStore(url, timeout_s=PATIENCE_S, key_prefix=secrets.token_hex(8)))
        try:
            for side in (memory, real):
                for number in range(1, 5):
                    await side.open(number)
                if is_split:
                    await side.fill()
            for batch, is_removal in history:
                assert await step(real, batch, is_removal) == await step(memory, batch, is_removal)
                assert await real.values() == await memory.values()
                assert await real.digests() == await memory.digests()
                assert {each.entry async for some in real.store.locations.chunks() for each in some} == {
                    each.entry async for some in memory.store.locations.chunks() for each in some
                }
        finally:
            await real.store.close()

    asyncio.run(both())


@settings(max_examples=60)
@given(history=batches, grid=st.sampled_from(GRIDS))
@pytest.mark.slow
def test_a_batch_of_changes_of_one_group_does_what_the_reference_does(
    redis_server: RedisServer, history: Batches, grid: int
) -> None:
    compare_batches(redis_server.url, history, grid, is_split=False)


@settings(max_examples=10)
@given(history=batches, grid=st.sampled_from(GRIDS))
@pytest.mark.slow
def test_a_batch_of_changes_of_a_split_group_does_so(redis_server: RedisServer, history: Batches, grid: int) -> None:
    compare_batches(redis_server.url, history, grid, is_split=True)


def test_a_group_is_changed_by_one_script(redis_server: RedisServer) -> None:
    """Not by one a chunk: announcing ten million pages would take minutes."""

    async def calls_of(chunk_count: int) -> int:
        side = Side(RedisIndexStore(redis_server.url, timeout_s=PATIENCE_S, key_prefix=secrets.token_hex(8)))
        fence, operation = await side.open(1), Operation(ordinal=1, full_shards=1, added=(0, 0, 1))
        chunks = [
            ChunkOperation(keyspace=KEYSPACE, chunk_hash=chunk, group_head=HEAD, operation=operation)
            for chunk in FILLING[:chunk_count]
        ]
        await side.store.locations.apply(fence, chunks[:1])
        before = script_calls()
        await side.store.locations.apply(fence, chunks[1:])
        await side.store.close()
        return script_calls() - before

    def script_calls() -> int:
        stats = facts(redis_server.port, "commandstats")["cmdstat_evalsha"]
        return int(stats.split(",")[0].removeprefix("calls="))

    assert asyncio.run(calls_of(17)) == 1
    assert asyncio.run(calls_of(131)) == 3, "no script takes longer than that of 64 chunks"
