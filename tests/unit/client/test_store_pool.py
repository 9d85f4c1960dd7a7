"""The pool without an agent over a scripted index: what it asks again, what it remembers, and what it never raises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.client.index import OpenedKeyspace
from kvpool.client.store_config import StoreConfig
from kvpool.client.store_pool import AsyncStorePages
from kvpool.client.store_values import ChunkPlace, KeyspaceShards, OpenedShards
from kvpool.core.cluster import ChainMatch, ChainQuery, Location, MatchRun, NodeInfo, NodeKind
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
        self.match_stream = SimpleNamespace(match_many=self.match_many)

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


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Callable[[Index], tuple[AsyncStorePages, OpenedShards]]]:
    pools: list[Any] = []

    def make(index: Index) -> tuple[AsyncStorePages, OpenedShards]:
        config = StoreConfig.of({"index_endpoints": ["unused:1"], "pagestore": f"unix:{tmp_path}/nobody"})
        pool: Any = AsyncStorePages(config, "test")
        pool._index = index
        pools.append(pool)
        return pool, OpenedShards(space=SPACE, keyspace=KEYSPACE, hash_key=bytes(32))

    yield make
    for pool in pools:
        await pool._transport.close()


Make = Callable[[Index], tuple[AsyncStorePages, OpenedShards]]


async def test_a_keyspace_that_the_index_has_lost_is_opened_again(made: Make) -> None:
    index = Index(KeyspaceUnknown("gone"), 3)
    pool, space = made(index)
    assert await pool.find(space, CHAIN) == [True] * 3 + [False] * 2
    assert index.opened == 1 and [query.chunk_count for query in index.queries] == [5, 5]
    assert pool._found[CHAIN[0].chunk_hash].remote[0].bulk_endpoint == "host:1"


@pytest.mark.parametrize("error", [StoreUnavailable("no Redis"), ServiceUnavailable("no index")])
async def test_an_index_that_cannot_answer_is_a_miss(made: Make, error: KvPoolError) -> None:
    pool, space = made(Index(error))
    assert await pool.find(space, CHAIN) == [False] * 5
    assert pool.counts.failed_calls == 1 and str(error) in pool.counts.last_failure


async def test_without_a_pagestore_everything_is_a_miss_and_places_are_forgotten(made: Make) -> None:
    pool, space = made(Index(5, 5))
    assert all(await pool.find(space, CHAIN))

    def never(position: int, shard: int, payload: memoryview) -> None:
        raise AssertionError("nothing is copied")

    assert await pool.get(space, CHAIN, never) == [False] * 5
    assert await pool.put(space, CHAIN, never) == [False] * 5
    assert not pool._found and not pool.connected
    assert (pool.counts.missed_chunks, pool.counts.refused_chunks) == (5, 5)
    assert await pool.get(space, [], never) == []


async def test_pages_of_another_split_are_read_where_they_have_all_heads(made: Make) -> None:
    """The space is one shard of two heads; the other ranks' shards 1 and 2 have a head each."""
    pool, space = made(Index([0b001, 0b110, 0b010, 0b111]))
    assert await pool.find(space, CHAIN[:4]) == [True, True, False, True]
    read = {chunk_hash: found.shards for chunk_hash, found in pool._found.items()}
    assert read == {CHAIN[0].chunk_hash: 0b001, CHAIN[1].chunk_hash: 0b110, CHAIN[3].chunk_hash: 0b001}


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
