"""Every PagePool: the fake, the arena of a real pagestore, bulk streams to one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from kvpool.client.index import IndexClient
from kvpool.client.pagestore import SessionPlan
from kvpool.core.cluster import ChainMatch, ChainQuery, NodeInfo, RemoteSource, StaleLocation
from kvpool.core.outcome import Tier
from kvpool.core.spans import PageSpan
from kvpool_gpuagent.adapters.arena_pool import ArenaLink, ArenaPool
from kvpool_gpuagent.adapters.page_streams import PeerClients
from kvpool_gpuagent.adapters.stream_pool import StreamBuffers, StreamPool
from kvpool_gpuagent.ports import PagePool
from tests.fixtures.agent_fakes import MemoryCluster, MemoryPool
from tests.fixtures.pagestore import (
    KEYSPACE,
    PAGE_BYTES,
    SPEC,
    RecordingIndex,
    chunk_hash,
    new_world,
)
from tests.fixtures.pagestore_server import Served, served
from tests.fixtures.patience import patient, patient_agents

WINDOW_PAGES = 8


@dataclass(kw_only=True)
class Pools:
    """Makes pools of one cluster that see each other's pages."""

    make: Callable[[], PagePool]
    slots_out: Callable[[PagePool], int]
    sources: tuple[RemoteSource, ...] = ()  # where a reader is to learn that pages may be

    def span(self, numbers: Sequence[int]) -> PageSpan:
        """Shard 0 of chunks with consecutive numbers, at least one."""
        first, last = numbers[0], numbers[-1]
        assert list(numbers) == list(range(first, last + 1))
        return PageSpan(
            keyspace=KEYSPACE,
            chunk_hashes=b"".join(chunk_hash(number) for number in numbers),
            first_chunk_index=first,
            parent_hash=chunk_hash(first - 1) if first else bytes(16),
            group_heads=b"".join(chunk_hash(16 * group) for group in range(first // 16, last // 16 + 1)),
            positions=np.arange(len(numbers), dtype=np.int32),
            shards=np.zeros(len(numbers), dtype=np.uint8),
            sources=((len(numbers), self.sources),) if self.sources else (),
        )


class RecordedIndex:
    """What StreamPool asks of an index client, answered from what the pagestore announced."""

    def __init__(self, node: NodeInfo, known: RecordingIndex) -> None:
        self._node, self._known = node, known
        self.match_stream = self
        self.stale: list[StaleLocation] = []

    async def place(self, keyspace: bytes, chain_head_hash: bytes, *, host_id: str = "") -> list[NodeInfo]:
        return [self._node]

    async def match(self, query: ChainQuery, *, timeout_s: float) -> ChainMatch:
        hashes = [query.chunk_hashes[at : at + 16] for at in range(0, len(query.chunk_hashes), 16)]
        count = 0
        for one in hashes:
            if self._known.known.get((query.keyspace, one, Tier.STAGING), 0) & query.shards != query.shards:
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
        make=lambda: MemoryPool(cluster, SPEC, window_pages=WINDOW_PAGES),
        slots_out=lambda pool: cast(MemoryPool, pool).slots_out,
    )


@asynccontextmanager
async def arena_pools() -> AsyncIterator[Pools]:
    with new_world() as world:
        async with served(world, max_leases=WINDOW_PAGES) as store:
            plan = SessionPlan(endpoint=store.endpoint, peer_name="agent")
            link = ArenaLink(plan, patient())
            yield Pools(make=lambda: ArenaPool(link, KEYSPACE, SPEC), slots_out=lambda pool: link.slots_out)
            await link.close()


@asynccontextmanager
async def stream_pools() -> AsyncIterator[Pools]:
    with new_world() as world:
        async with served(world) as store:
            peers, buffers = PeerClients(), StreamBuffers.of(2 * WINDOW_PAGES * PAGE_BYTES)
            index = cast(IndexClient, RecordedIndex(store.node, world.index))
            yield Pools(
                make=lambda: StreamPool(KEYSPACE, SPEC, index, buffers, peers, ""),
                slots_out=lambda pool: buffers.reads.used_bytes + buffers.writes.used_bytes,
                sources=(_source(store),),
            )
            peers.close()


def _source(store: Served) -> RemoteSource:
    return RemoteSource(
        node_id=store.node.node_id,
        incarnation=store.running.engine.incarnation,
        bulk_endpoint=store.node.bulk_endpoint,
    )


@pytest.fixture(params=[memory_pools, arena_pools, stream_pools], ids=["memory", "arena", "stream"])
async def pools(request: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pools]:
    patient_agents(monkeypatch)
    async with request.param() as made:
        yield made
