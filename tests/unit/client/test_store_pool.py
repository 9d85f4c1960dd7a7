"""The pool without an agent over a scripted index: what it asks again, what it remembers, and what it never raises."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import AsyncMock

import pytest

from kvpool.client import store_pool
from kvpool.client.index import OpenedKeyspace
from kvpool.client.object_store import object_space
from kvpool.client.store_config import StoreConfig
from kvpool.client.store_pool import AsyncStorePages, arena_call_bytes
from kvpool.client.store_reading import WindowRead
from kvpool.client.store_values import ChunkPlace, KeyspaceShards, OpenedShards, PayloadCopy, WantedPage
from kvpool.client.store_writing import WindowWritten
from kvpool.core.cluster import ChainMatch, ChainQuery, Location, MatchRun, NodeInfo, NodeKind, RemoteSource
from kvpool.core.errors import KeyspaceUnknown, KvPoolError, ServiceUnavailable, StoreUnavailable
from kvpool.core.grid import ShardGrid
from kvpool.core.outcome import Tier
from tests.fixtures.pagestore import KEYSPACE, SPEC

CHAIN = ChunkPlace.chain([bytes([number]) * 16 for number in range(5)])
SPACE = KeyspaceShards.of("test", SPEC, ShardGrid.of(SPEC).all_shards)
NODE = NodeInfo(node_id=b"n" * 16, kind=NodeKind.PAGESTORE, bulk_endpoint="host:1")


class Index:
    """Answers by a script: errors, counts of chunks that a node has as asked, or bitmaps of what it has of each."""

    def __init__(self, *script: KvPoolError | int | list[int]) -> None:
        self.script, self.opened, self.asked, self.queries = list(script), 0, 0, list[ChainQuery]()
        self.match_stream = SimpleNamespace(match_many=self.match_many, close=self.close)
        self.endpoints = SimpleNamespace(close=self.close)

    async def close(self) -> None:
        pass

    async def open_keyspace(self, name: str, spec: object, *, timeout_s: float) -> OpenedKeyspace:
        self.opened += 1
        return OpenedKeyspace(keyspace=KEYSPACE, hash_key=bytes(32), grid=ShardGrid.of(SPEC), created=False)

    async def match_many(self, queries: Sequence[ChainQuery], *, timeout_s: float) -> list[ChainMatch | KvPoolError]:
        self.asked += 1
        return [self.match(query) for query in queries]

    def match(self, query: ChainQuery) -> ChainMatch | KvPoolError:
        self.queries.append(query)
        answer = self.script.pop(0)
        if isinstance(answer, KvPoolError):
            return answer
        held = [query.shards] * answer if isinstance(answer, int) else answer
        runs = tuple(
            MatchRun(
                chunk_count=1,
                locations=(Location(node_id=NODE.node_id, incarnation=7, tier=Tier.DISK, shards=shards),),
            )
            for shards in held
        )
        return ChainMatch(matched_chunks=len(held), runs=runs, nodes={NODE.node_id: NODE})


class EmptyTransport:
    """Pagestores that have nothing of what they are asked for. asked: pages, with the nodes that were named."""

    node_id, connected, reads_at_once = b"", True, 1

    def __init__(self) -> None:
        self.asked: list[tuple[WantedPage, tuple[RemoteSource, ...]]] = []
        self.windows: list[int] = []

    def prepare(self) -> None:
        pass

    def pages_max(self, payload_bytes: int) -> int:
        return (512 << 20) // payload_bytes

    @asynccontextmanager
    async def use(self, space: OpenedShards) -> AsyncGenerator[EmptyTransport]:
        yield self

    async def read(
        self, pages: Sequence[WantedPage], sources: Sequence[tuple[RemoteSource, ...]], wait_s: float, take: PayloadCopy
    ) -> WindowRead:
        self.asked += zip(pages, sources, strict=True)
        self.windows.append(len(pages))
        return WindowRead()

    async def write(self, pages: Sequence[WantedPage], wait_s: float, fill: PayloadCopy) -> WindowWritten:
        raise AssertionError("nothing is written")

    async def close(self) -> None:
        pass


class Make(Protocol):
    """Makes a pool; transport: None for that of a pagestore which is not there."""

    def __call__(
        self, index: Index, transport: EmptyTransport | None = None
    ) -> tuple[AsyncStorePages, OpenedShards]: ...


def never(position: int, shard: int, payload: memoryview) -> None:
    raise AssertionError("nothing is copied")


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Make]:
    pools: list[AsyncStorePages] = []

    def make(index: Index, transport: EmptyTransport | None = None) -> tuple[AsyncStorePages, OpenedShards]:
        config = StoreConfig.of({"index_endpoints": ["unused:1"], "pagestore": f"unix:{tmp_path}/nobody"})
        scripted: Any = index
        pools.append(AsyncStorePages(config, "test", index=scripted, transport=transport))
        return pools[-1], OpenedShards(space=SPACE, keyspace=KEYSPACE, hash_key=bytes(32))

    yield make
    for pool in pools:
        await pool.close()


async def test_a_keyspace_that_the_index_has_lost_is_opened_again(made: Make) -> None:
    index = Index(KeyspaceUnknown("gone"), 3)
    transport = EmptyTransport()
    pool, space = made(index, transport)
    assert await pool.find(space, CHAIN) == [True] * 3 + [False] * 2
    assert index.opened == 1 and [query.chunk_count for query in index.queries] == [5, 5]
    assert await pool.get(space, CHAIN[:3], never) == [False] * 3
    assert [[source.bulk_endpoint for source in sources] for _, sources in transport.asked] == [["host:1"]] * 3


@pytest.mark.parametrize("error", [StoreUnavailable("no Redis"), ServiceUnavailable("no index")])
async def test_an_index_that_cannot_answer_is_a_miss(made: Make, error: KvPoolError) -> None:
    pool, space = made(Index(error))
    assert await pool.find(space, CHAIN) == [False] * 5
    assert pool.counts.failed_calls == 1 and str(error) in pool.counts.last_failure


async def test_without_a_pagestore_everything_is_a_miss_and_places_are_forgotten(made: Make) -> None:
    index = Index(5, 5)
    pool, space = made(index)
    assert all(await pool.find(space, CHAIN))
    assert await pool.get(space, CHAIN, never) == [False] * 5
    assert await pool.put(space, CHAIN, never) == [False] * 5
    assert not pool.connected
    assert (pool.counts.missed_chunks, pool.counts.refused_chunks) == (5, 5)
    assert await pool.get(space, [], never) == []
    assert index.asked == 1
    assert await pool.get(space, CHAIN[-1:], never) == [False]
    assert index.asked == 2, "where the chunks are was forgotten"


async def test_pages_of_another_split_are_read_where_they_have_all_heads(made: Make) -> None:
    """The space is one shard of two heads; the other ranks' shards 1 and 2 have a head each."""
    index, transport = Index([0b001, 0b110, 0b010, 0b111]), EmptyTransport()
    pool, space = made(index, transport)
    assert await pool.find(space, CHAIN[:4]) == [True, True, False, True]
    found = [CHAIN[0], CHAIN[1], CHAIN[3]]
    assert await pool.get(space, found, never) == [False] * 3
    read = [(page.position, page.shard) for page, _ in transport.asked]
    assert sorted(read) == [(0, 0), (1, 1), (1, 2), (2, 0)]
    assert index.asked == 1, "they were known"


async def test_chunks_that_stand_alone_are_questions_of_their_own_asked_at_once(made: Make) -> None:
    index = Index(1, 0, 1)
    pool, space = made(index)
    alone = [ChunkPlace.alone(chunk.chunk_hash) for chunk in CHAIN[:3]]
    assert await pool.find(space, alone) == [True, False, True]
    assert all(query.group_head_hash == query.chunk_hashes for query in index.queries)
    assert index.asked == 1


async def test_one_question_that_fails_fails_the_look_up(made: Make) -> None:
    pool, space = made(Index(1, StoreUnavailable("no Redis"), 1))
    alone = [ChunkPlace.alone(chunk.chunk_hash) for chunk in CHAIN[:3]]
    assert await pool.find(space, alone) == [False] * 3
    assert pool.counts.failed_calls == 1


@pytest.mark.parametrize(("arena_gib", "mib"), [(1, 64), (8, 512), (16, 1024), (500, 1024), (0, 1024)])
def test_a_call_holds_a_part_of_the_arena(arena_gib: int, mib: int) -> None:
    assert arena_call_bytes(arena_gib << 30) == mib << 20


async def test_a_call_asks_for_fewer_large_pages_at_once_as_they_take_the_room_of_others(made: Make) -> None:
    transport = EmptyTransport()
    pool, _ = made(Index(*[0] * 140), transport)
    chunks = [ChunkPlace.alone(number.to_bytes(16, "big")) for number in range(70)]
    for size_bytes, windows in ((1 << 20, [64, 6]), (16 << 20, [32, 32, 6])):
        space = object_space("e", "m", "r", size_bytes, kind="k")
        transport.windows = []
        await pool.get(OpenedShards(space=space, keyspace=KEYSPACE, hash_key=bytes(32)), chunks, never)
        assert transport.windows == windows


async def test_a_keyspace_is_cleared_on_all_pagestores_that_answer(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Control:
        def __init__(self, endpoint: str, config: object) -> None:
            self._endpoint = endpoint

        async def clear(self, keyspace: bytes, *, timeout_s: float) -> int:
            asked.append(self._endpoint)
            if self._endpoint == "dead:1":
                raise ServiceUnavailable("unreachable")
            return 1

        async def close(self) -> None: ...

    monkeypatch.setattr(store_pool, "PageStoreControl", Control)
    index: Any = Index()
    index.list_nodes = AsyncMock(
        return_value=[SimpleNamespace(info=SimpleNamespace(endpoint=one)) for one in ("dead:1", "live:1", "live:2")]
    )
    pool, space = made(index)
    assert not await pool.clear(space)
    assert asked == ["dead:1", "live:1", "live:2"]
    index.list_nodes.return_value = index.list_nodes.return_value[1:]
    assert await pool.clear(space)
