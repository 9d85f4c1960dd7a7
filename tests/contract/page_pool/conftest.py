"""Every PagePool: the fake, the arena of a real pagestore, bulk streams to one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest

from kvpool.client.index import IndexClient
from kvpool.client.pagestore import SessionPlan
from kvpool.core.cluster import ChainMatch, ChainQuery, NodeInfo, RemoteSource, StaleLocation
from kvpool.core.outcome import Tier
from kvpool_gpuagent.adapters import arena_pool, stream_pool
from kvpool_gpuagent.adapters.arena_pool import ArenaPool
from kvpool_gpuagent.adapters.bounce import PeerClients
from kvpool_gpuagent.adapters.stream_pool import StreamBuffers, StreamPool
from kvpool_gpuagent.ports import PagePool, PageWish
from tests.fixtures.agent_fakes import MemoryCluster, MemoryPool
from tests.fixtures.pagestore import (
    KEYSPACE,
    KEYSPACES,
    PAGE_BYTES,
    SPEC,
    RecordingIndex,
    metadata,
    new_world,
    page_key,
)
from tests.fixtures.pagestore_server import Served, served
from tests.fixtures.patience import PATIENCE_S, patient

WINDOW_PAGES = 8


@dataclass(kw_only=True)
class Pools:
    """Makes pools of one cluster that see each other's pages."""

    make: Callable[[], PagePool]
    slots_out: Callable[[PagePool], int]
    wish: Callable[[int], PageWish]


class RecordedIndex:
    """What StreamPool asks of an index client, answered from what the pagestore announced."""

    def __init__(self, node: NodeInfo, known: RecordingIndex) -> None:
        self._node, self._known = node, known
        self.match_stream = self
        self.stale: list[StaleLocation] = []

    async def place(self, keyspace: bytes, chain_head_hash: bytes, *, host_id: str = "") -> list[NodeInfo]:
        return [self._node]

    async def match(self, query: ChainQuery) -> ChainMatch:
        hashes = [query.chunk_hashes[at : at + 16] for at in range(0, len(query.chunk_hashes), 16)]
        count = 0
        for chunk_hash in hashes:
            if self._known.known.get((query.keyspace, chunk_hash, Tier.STAGING), 0) & query.shards != query.shards:
                break
            count += 1
        return ChainMatch(matched_chunks=count)

    async def report_stale(self, locations: list[StaleLocation]) -> list[bool]:
        self.stale += locations
        return [True] * len(locations)


@asynccontextmanager
async def memory_pools() -> AsyncIterator[Pools]:
    cluster = MemoryCluster()
    yield Pools(
        make=lambda: MemoryPool(cluster, window_pages=WINDOW_PAGES),
        slots_out=lambda pool: cast(MemoryPool, pool).slots_out,
        wish=_wish,
    )


@asynccontextmanager
async def arena_pools() -> AsyncIterator[Pools]:
    with new_world() as world:
        async with served(world, max_leases=WINDOW_PAGES) as store:
            plan = SessionPlan(endpoint=store.endpoint, peer_name="agent", keyspaces=KEYSPACES)
            yield Pools(
                make=lambda: ArenaPool(plan, patient()),
                slots_out=lambda pool: cast(ArenaPool, pool).slots_out,
                wish=_wish,
            )


@asynccontextmanager
async def stream_pools() -> AsyncIterator[Pools]:
    with new_world() as world:
        async with served(world) as store:
            peers, buffers = PeerClients(), StreamBuffers.of(2 * WINDOW_PAGES * PAGE_BYTES)
            index = cast(IndexClient, RecordedIndex(store.node, world.index))
            yield Pools(
                make=lambda: StreamPool(KEYSPACE, SPEC, index, buffers, peers, ""),
                slots_out=lambda pool: buffers.reads.used_bytes + buffers.writes.used_bytes,
                wish=lambda number: _wish(number, _source(store)),
            )
            peers.close()


def _source(store: Served) -> RemoteSource:
    return RemoteSource(
        node_id=store.node.node_id,
        incarnation=store.running.engine.incarnation,
        bulk_endpoint=store.node.bulk_endpoint,
    )


def _wish(number: int, *sources: RemoteSource) -> PageWish:
    return PageWish(
        key=page_key(number), metadata=metadata(number), chain_head_hash=page_key(0).chunk_hash, sources=sources
    )


@pytest.fixture(params=[memory_pools, arena_pools, stream_pools], ids=["memory", "arena", "stream"])
async def pools(request: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pools]:
    monkeypatch.setattr(arena_pool, "CONNECT_WAIT_S", PATIENCE_S)
    for module in (arena_pool, stream_pool):
        monkeypatch.setattr(module, "RESERVE_WAIT_S", PATIENCE_S)
    async with request.param() as made:
        yield made
