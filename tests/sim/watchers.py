"""Simulated watchers of the index: a plain one that keeps each chunk's latest event, and a replica of locations."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from kvpool.client.config import ClientConfig
from kvpool.client.index import IndexClient
from kvpool.core.cluster import ChainQuery, ChunkEvent, IndexEvent, Location, NodeEvent, ResyncEvent
from kvpool.core.errors import KvPoolError
from kvpool.core.outcome import Tier
from kvpool_index.core.events import ORIGIN, Position, entry_order, unpack_chunks
from kvpool_server.node.replica_feed import LocationReplica, MatchedBy, ReplicaConfig
from tests.sim.nodes import SimClock, World
from tests.sim.pages import GRID, KEYSPACE, SPEC, chunk_hash

_POSITIONS = 4

Holding = tuple[bytes, Tier, int]
"""A node's id, and the shards that it has in a tier."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The latest event of a chunk."""

    version: int
    locations: tuple[Location, ...]


class Watcher:
    """A process that watches, stands still now and then, and is compared with the index in the end."""

    def __init__(self, world: World, name: str, *, is_replica: bool) -> None:
        self._world = world
        self.name = name
        self._is_replica = is_replica
        self._process = world.loop.process(name)
        self._seen: dict[bytes, Seen] = {}  # by the beginning of the chunk's hash, since the last RESYNC
        self._alive: dict[bytes, int] = {}  # incarnations of nodes, as far as events named them
        self._replica: LocationReplica | None = None
        self.resync_count = 0
        # The last entry of each stream of chunks before what it gets since its beginning or the last RESYNC; None: not
        # known before the next event.
        self._begins_after: tuple[str, ...] | None = None

    def start(self) -> None:
        self._world.loop.spawn(self._process, self._run(), self.name)
        self._world.loop.spawn(self._world.loop.world, self._stand_still_at_times(), "pauses of a watcher")

    def end_pauses(self) -> None:
        self._world.loop.resume(self._process)

    async def stale(self, truth: Callable[[bytes], Awaitable[set[Holding]]]) -> str:
        """What it has wrong; empty if nothing. truth: where a chunk is, by the beginning of its hash."""
        if self._is_replica:
            return await self._stale_in_replica(truth)
        for chunk, seen in self._seen.items():
            if seen.version < await self._version_before_beginning(chunk):
                continue  # an older event than one that it did not get: a receiver is to ask the index
            named, there = {_holding(one) for one in seen.locations if self._counts(one)}, await truth(chunk)
            missed = {holding for holding in there - named if not await self._has_returned(holding[0])}
            if named - there or (missed and not self._world.events_may_lack):
                return (
                    f"{self.name}: the last event of {chunk.hex()} (version {seen.version}) names {named}, not {there}"
                )
        return ""

    # Inside

    async def _run(self) -> None:
        world = self._world
        endpoints = [index.endpoint for index in world.indexes]
        config = ClientConfig(
            index_endpoints=tuple(endpoints),
            call_timeout_s=2.0,
            connect_timeout_s=2.0,
            backoff_initial_s=0.02,
            backoff_max_s=0.3,
        )
        index = IndexClient(config)
        if self._is_replica:
            self._replica = LocationReplica(index, ReplicaConfig(list_every_s=5.0), clock=SimClock(world.loop))
            self._replica.open_keyspace(KEYSPACE, GRID)
        while True:
            try:
                await index.open_keyspace("sim", SPEC)
                if self._replica is not None:
                    await self._replica.match(_query(world.rng.choice(world.chains)))
                    await asyncio.sleep(world.some_s(0.5))
                    continue
                async with aclosing(index.watch(now_s=world.loop.time)) as events:
                    async for event in events:
                        await self._take(event)
            except KvPoolError:
                await asyncio.sleep(world.some_s(0.3))

    async def _take(self, event: IndexEvent) -> None:
        position = Position.parse(event.position).entry_ids[:-1] if event.position else None
        if self._begins_after is None or isinstance(event.event, ResyncEvent):
            self._begins_after = position
        match event.event:
            case ChunkEvent() as chunk:
                known = self._seen.get(chunk.chunk_hash[:8])
                if chunk.keyspace == KEYSPACE and (known is None or chunk.version >= known.version):
                    self._seen[chunk.chunk_hash[:8]] = Seen(chunk.version, chunk.locations)
            case NodeEvent(node=node, alive=alive):
                self._alive[node.node_id] = node.incarnation if alive else 0
            case ResyncEvent():
                self.resync_count += 1
                self._seen.clear()
                # Among what was missed may be a node's return.
                nodes = await self._world.redis.store.nodes.snapshot()
                self._alive = {node.info.node_id: 0 if node.ended else node.info.incarnation for node in nodes}

    async def _version_before_beginning(self, chunk: bytes) -> int:
        """The newest of the chunk's events that came before the watch, or that the last RESYNC took the place of."""
        events = self._world.redis.store.events
        versions = [
            state.version
            for stream, last_id in enumerate(self._begins_after or ())
            for entry in await events.read(stream, ORIGIN, limit=sys.maxsize, wait_s=0.0)
            if entry_order(entry.entry_id) <= entry_order(last_id)
            for state in unpack_chunks(entry.payload)
            if (state.keyspace, state.chunk_hash[:8]) == (KEYSPACE, chunk)
        ]
        return max(versions, default=0)

    def _counts(self, location: Location) -> bool:
        """Whether no event has said that the node, or that process of it, is gone."""
        return self._alive.get(location.node_id, location.incarnation) == location.incarnation

    async def _has_returned(self, node_id: bytes) -> bool:
        """A node whose lease had ended brings its locations back with it; no event says so of each chunk."""
        nodes = self._world.redis.store.nodes
        return await nodes.find(node_id) is None or nodes.attempts[node_id].number > 1

    async def _stale_in_replica(self, truth: Callable[[bytes], Awaitable[set[Holding]]]) -> str:
        replica = self._replica
        if replica is None or not replica.is_current:
            return f"{self.name} does not hear that it is current"
        for chain in self._world.chains:
            known, matched_by = replica.known(_query(chain))
            is_absent = matched_by is MatchedBy.ABSENT and not known.matched_chunks
            if is_absent and await truth(chunk_hash(chain, 0)[:8]):
                return f"{self.name}: the replica calls chain {chain} absent"
            position = 0
            for run in known.runs:
                for _ in range(run.chunk_count):
                    chunk = chunk_hash(chain, position)[:8]
                    wrong = {_holding(one) for one in run.locations} - await truth(chunk)
                    if wrong:
                        return f"{self.name}: the replica names {wrong} for {chunk.hex()}"
                    position += 1
        return ""

    async def _stand_still_at_times(self) -> None:
        loop, chance = self._world.loop, random.Random(self._world.rng.random())
        for _ in range(3):
            await asyncio.sleep(3.0 * chance.random())
            loop.pause(self._process)
            await asyncio.sleep(2.0 * chance.random())
            loop.resume(self._process)


def _query(chain: int) -> ChainQuery:
    hashes = b"".join(chunk_hash(chain, position) for position in range(_POSITIONS))
    return ChainQuery(keyspace=KEYSPACE, chunk_hashes=hashes)


def _holding(location: Location) -> Holding:
    return location.node_id, location.tier, location.shards & GRID.valid_shards
