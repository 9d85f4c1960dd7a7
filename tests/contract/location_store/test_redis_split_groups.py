"""Split groups in Redis: on a Cluster whose slots move, and how much work a split is."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

import pytest

from kvpool.core.location_digest import PART_COUNT, PartSpan, part_of, range_of
from kvpool.testing import eventually
from kvpool_index.adapters.redis_cluster import slot_of
from kvpool_index.adapters.redis_reads import group_key, part_keys, split_groups_key
from kvpool_index.adapters.redis_store import RedisIndexStore
from kvpool_index.core.entries import EVERY_SHARD, SPLIT_CHUNKS, GroupRead, TierMasks, decode_value
from kvpool_index.ports import StreamFence
from tests.contract.location_store.test_digests import reported
from tests.contract.location_store.test_locations import GRID, KEYSPACE, change, open_stream, staging
from tests.contract.location_store.test_split_groups import check_digests, fill, split_groups
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.redis_server import RedisServer
from tests.fixtures.redis_topologies import RedisCluster, ask, facts


@dataclass(frozen=True)
class Moving:
    """A group with very many chunks, and the two members between which its slot moves."""

    cluster: RedisCluster
    store: RedisIndexStore
    fence: StreamFence
    prefix: bytes
    head: bytes
    chunks: list[bytes]
    source: RedisServer
    target: RedisServer

    @property
    def group(self) -> bytes:
        return group_key(self.prefix, KEYSPACE, self.head)

    @property
    def slot(self) -> int:
        return slot_of(self.group)

    def begin(self) -> None:
        self.cluster.begin_move(self.slot, self.source, self.target)

    def move(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            ask(self.source.port, "MIGRATE", "127.0.0.1", str(self.target.port), key, "0", "60000")

    def end(self) -> None:
        """Move what is left, which must not be at the target already."""
        while self.cluster.move_keys(self.slot, self.source, self.target):
            pass
        self.cluster.end_move(self.slot, self.target)
        assert self.keys(self.source) == set(), "no key is left behind"

    def keys(self, member: RedisServer) -> set[bytes]:
        found = ask(member.port, "CLUSTER", "GETKEYSINSLOT", str(self.slot), "10000")
        assert isinstance(found, list)
        return {key.encode("utf-8", "surrogateescape") for key in found}

    async def values(self, chunks: Sequence[bytes]) -> list[dict[int, TierMasks]]:
        found = await self.store.locations.read(KEYSPACE, [GroupRead(self.head, [chunk[:8] for chunk in chunks])])
        return [{entry.ordinal: entry.shards for entry in decode_value(value, GRID)} for value in found]

    async def check(self, held: dict[bytes, TierMasks]) -> None:
        """The group has just these chunks, by what is read and by its digests."""
        expected = [{self.fence.ordinal: shards} for shards in held.values()]
        assert await self.values(list(held)) == expected
        named = {each.entry.field async for step in self.store.locations.chunks() for each in step}
        assert named == {chunk[:8] for chunk in held}
        await check_digests(self.store, self.fence.ordinal, self.head, held)


@pytest.fixture
async def moving(redis_cluster: RedisCluster) -> AsyncIterator[Moving]:
    prefix = f"t{secrets.token_hex(6)}"
    store = RedisIndexStore(redis_cluster.url, timeout_s=PATIENCE_S, key_prefix=prefix)
    fence = await open_stream(store)
    source = redis_cluster.servers[0]
    while True:
        head = secrets.token_bytes(16)
        key = group_key(prefix.encode(), KEYSPACE, head)
        # The tables of nodes stay where they are.
        if redis_cluster.owner(key) is source and slot_of(key) != slot_of(f"{prefix}:{{n}}:records".encode()):
            break
    chunks = [bytes([at % PART_COUNT]) + secrets.token_bytes(15) for at in range(SPLIT_CHUNKS)]
    await fill(store, fence, head, chunks)
    yield Moving(redis_cluster, store, fence, prefix.encode(), head, chunks, source, target=redis_cluster.servers[1])
    await store.close()


async def split(moving: Moving) -> bytes:
    """Add the chunk that splits the group, and return it."""
    chunk = secrets.token_bytes(16)
    await fill(moving.store, moving.fence, moving.head, [chunk])
    assert len(await split_groups(moving.store, moving.fence.ordinal, range_of(moving.head))) == 1
    return chunk


async def test_a_split_group_is_read_and_changed_while_its_slot_moves(moving: Moving) -> None:
    store, fence, head = moving.store, moving.fence, moving.head
    held = dict.fromkeys([*moving.chunks, await split(moving)], staging(GRID))
    parts = part_keys(moving.prefix, KEYSPACE + head)
    moving.begin()
    moving.move(parts[:100])
    assert await moving.values(list(held)) == [{fence.ordinal: staging(GRID)}] * len(held)
    here = [chunk for chunk in held if part_of(chunk) >= 100]
    there = [chunk for chunk in held if part_of(chunk) < 100]
    await fill(store, fence, head, here, (0, 0, 1))
    waiting = asyncio.create_task(fill(store, fence, head, there, (1, 0, 0)))
    before = store.redis.redirections["try_again"]
    await eventually(lambda: store.redis.redirections["try_again"] > before)
    assert not waiting.done(), "the part is at one member and the group at the other"
    while moving.cluster.move_keys(moving.slot, moving.source, moving.target, limit=50):
        assert len(await moving.values(list(held))) == len(held)
    await waiting
    held.update(dict.fromkeys(here, (0, GRID, 1)))
    held.update(dict.fromkeys(there, (1, GRID, 0)))
    gone = there[0]
    await store.locations.remove([change(fence.ordinal, gone, head, removed=EVERY_SHARD)])
    del held[gone]
    moving.end()
    await moving.check(held)
    await fill(store, fence, head, held, (0, 0, GRID))
    await moving.check({chunk: (gpu, stage, GRID) for chunk, (gpu, stage, _) in held.items()})


async def test_a_group_that_loses_its_chunks_on_the_move_is_not_listed_after_it(moving: Moving) -> None:
    store, fence, head = moving.store, moving.fence, moving.head
    chunks = [*moving.chunks, await split(moving)]
    beside = secrets.token_bytes(14) + head[-2:]
    await fill(store, fence, beside, [beside])
    moving.begin()
    moving.move([split_groups_key(moving.prefix, range_of(head))])
    removals = [change(fence.ordinal, chunk, head, removed=EVERY_SHARD) for chunk in chunks]
    removing = asyncio.create_task(store.locations.remove(removals))
    before = store.redis.redirections["try_again"]
    await eventually(lambda: store.redis.redirections["try_again"] > before or removing.done())
    moving.end()
    await removing
    async for _ in store.locations.drop(KEYSPACE, fence.ordinal):
        pass
    assert await split_groups(store, fence.ordinal, range_of(head)) == {}
    assert await reported(store, fence.ordinal) == {}
    groups = {group_key(moving.prefix, KEYSPACE, each) for each in (head, beside)}
    assert {key for key in moving.keys(moving.target) if key.startswith(moving.prefix + b":")} <= groups


async def test_a_group_that_grows_while_its_slot_moves_is_split_after_it(moving: Moving) -> None:
    store, fence, head = moving.store, moving.fence, moving.head
    held = dict.fromkeys(moving.chunks, staging(GRID))
    moving.begin()
    new = [secrets.token_bytes(16) for _ in range(200)]
    await fill(store, fence, head, new[:100])  # it does not wait for the end of the move
    held.update(dict.fromkeys(new, staging(GRID)))
    assert store.redis.redirections["try_again"] >= 1
    assert await split_groups(store, fence.ordinal, range_of(head)) == {}
    moving.end()
    await fill(store, fence, head, new[100:])
    await moving.check(held)


async def test_members_without_the_scripts_change_and_split_groups(moving: Moving) -> None:
    store, fence, head = moving.store, moving.fence, moving.head
    held = dict.fromkeys(moving.chunks, staging(GRID))
    for server in moving.cluster.servers:
        ask(server.port, "SCRIPT", "FLUSH", "SYNC")
    held[await split(moving)] = staging(GRID)
    moving.begin()
    moving.move(moving.keys(moving.source))
    for server in moving.cluster.servers:
        ask(server.port, "SCRIPT", "FLUSH", "SYNC")
    before = store.redis.redirections["ask"]
    await fill(store, fence, head, held, (0, 0, 1))
    assert store.redis.redirections["ask"] > before
    moving.end()
    await moving.check(dict.fromkeys(held, (0, GRID, 1)))


async def test_a_store_that_does_not_know_that_a_group_is_split_learns_it_once(moving: Moving) -> None:
    chunk = await split(moving)
    peer = RedisIndexStore(moving.cluster.url, timeout_s=PATIENCE_S, key_prefix=moving.prefix.decode())
    scripts = _calls(moving.source, "evalsha")
    await fill(peer, moving.fence, moving.head, [chunk], (0, 0, 1))
    assert _calls(moving.source, "evalsha") == scripts + 2
    await fill(peer, moving.fence, moving.head, [chunk], (0, 0, 3))
    assert _calls(moving.source, "evalsha") == scripts + 3
    assert await moving.values([chunk]) == [{moving.fence.ordinal: (0, GRID, 3)}]
    await peer.close()


async def test_a_split_computes_no_fingerprints_and_a_change_those_of_one_part(redis_server: RedisServer) -> None:
    """Both are bounded whatever number of nodes has each chunk: 65,536 fingerprints took Redis a fifth of a second."""
    prefix, head = f"t{secrets.token_hex(6)}", secrets.token_bytes(16)
    store = RedisIndexStore(redis_server.url, timeout_s=PATIENCE_S, key_prefix=prefix)
    fences = [await open_stream(store) for _ in range(3)]
    chunks = [bytes([at % PART_COUNT]) + secrets.token_bytes(15) for at in range(SPLIT_CHUNKS + 1)]
    for fence in fences:
        await fill(store, fence, head, chunks[:SPLIT_CHUNKS])
    before = {name: _calls(redis_server, name) for name in ("hset", "hget", "hmget", "hgetall", "unlink")}
    await fill(store, fences[0], head, chunks[SPLIT_CHUNKS:])
    work = {name: _calls(redis_server, name) - count for name, count in before.items()}
    assert work["hset"] <= PART_COUNT + 8 and work["hgetall"] == 1 and work["unlink"] <= 2
    assert work["hget"] + work["hmget"] <= 4

    def with_digests() -> set[int]:
        keys = part_keys(prefix.encode(), KEYSPACE + head)
        fields = [ask(redis_server.port, "HKEYS", key) for key in keys]
        return {
            part
            for part, names in enumerate(fields)
            if isinstance(names, list) and any(len(name.encode("utf-8", "surrogateescape")) == 4 for name in names)
        }

    assert with_digests() == set()
    await fill(store, fences[1], head, [chunks[7]], (0, 0, 1))
    assert with_digests() == {7}
    span = PartSpan(KEYSPACE, head, 9)
    assert await store.locations.part_digest(fences[2].ordinal, span)
    assert with_digests() == {7, 9}
    held = dict.fromkeys(chunks[:SPLIT_CHUNKS], staging(GRID))
    await check_digests(store, fences[2].ordinal, head, held)
    held[chunks[7]] = (0, GRID, 1)
    await check_digests(store, fences[1].ordinal, head, held)
    await store.close()


def _calls(server: RedisServer, command: str) -> int:
    """How many times a server has run a command, those of scripts included."""
    found = facts(server.port, "commandstats").get(f"cmdstat_{command}", "calls=0,")
    return int(found.split(",")[0].removeprefix("calls="))
