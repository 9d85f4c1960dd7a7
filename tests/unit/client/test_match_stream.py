"""Matches on an open stream, against a scripted index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvpool.client.index import IndexClient
from kvpool.core.cluster import ChainQuery
from kvpool.core.errors import DeadlineExceeded, KeyspaceUnknown, ServiceUnavailable, StoreUnavailable
from kvpool.testing import eventually
from kvpool.v1 import index_pb2, index_pb2_grpc
from kvpool.wire.convert import item_error_to_proto
from tests.fixtures.patience import PATIENCE_S
from tests.unit.client.servers import Script, Streams, serve, test_config

HASH = bytes(range(16))


class ScriptedIndex(index_pb2_grpc.IndexServiceServicer):
    def __init__(self) -> None:
        self.streams = Streams()

    async def MatchStream(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for message in self.streams.run(request_iterator, context):
            yield message


@asynccontextmanager
async def scripted(**settings: Any) -> AsyncGenerator[tuple[ScriptedIndex, IndexClient]]:
    index = ScriptedIndex()  # type: ignore[abstract]
    async with serve(index_pb2_grpc.add_IndexServiceServicer_to_server, index) as (_, endpoint):
        client = IndexClient(test_config(index_endpoints=(endpoint,), **settings))
        try:
            yield index, client
        finally:
            await client.close()


def query(chunks: int) -> ChainQuery:
    return ChainQuery(keyspace=HASH, chunk_hashes=HASH * chunks)


def answer(request: Any, matched: int) -> Any:
    match = index_pb2.MatchResponse(matched_chunks=matched, runs=[index_pb2.MatchRun(chunk_count=matched)])
    return index_pb2.MatchStreamResponse(request_id=request.request_id, match=match)


async def next_match(stream: Script) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        return await stream.received.get()


async def test_answers_come_out_of_order() -> None:
    async with scripted() as (index, client):
        asked = [asyncio.create_task(client.match_stream.match(query(count))) for count in (1, 2, 3)]
        stream = await index.streams.next()
        requests = [await next_match(stream) for _ in asked]
        for request in reversed(requests):
            stream.send(answer(request, len(request.match.chunk_hashes) // 16))
        assert [match.matched_chunks for match in await asyncio.gather(*asked)] == [1, 2, 3]
        assert index.streams.count == 1


async def test_a_refused_match_leaves_the_stream_open() -> None:
    async with scripted() as (index, client):
        for error in (KeyspaceUnknown("k"), StoreUnavailable("redis")):
            asked = asyncio.create_task(client.match_stream.match(query(1)))
            if index.streams.count == 0:
                stream = await index.streams.next()
            request = await next_match(stream)
            stream.send(index_pb2.MatchStreamResponse(request_id=request.request_id, error=item_error_to_proto(error)))
            with pytest.raises(type(error)):
                await asked
        assert index.streams.count == 1


async def test_a_broken_stream_fails_pending_matches_at_once_and_the_next_one_reconnects() -> None:
    async with scripted() as (index, client):
        asked = [asyncio.create_task(client.match_stream.match(query(1))) for _ in range(3)]
        stream = await index.streams.next()
        await next_match(stream)
        stream.end()
        async with asyncio.timeout(PATIENCE_S):
            results = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(result, ServiceUnavailable) for result in results)
        again = asyncio.create_task(client.match_stream.match(query(1)))
        stream = await index.streams.next()
        stream.send(answer(await next_match(stream), 1))
        assert (await again).matched_chunks == 1


async def test_a_late_answer_is_ignored_and_does_not_take_the_place_for_ever() -> None:
    async with scripted(requests_in_flight_max=1) as (index, client):
        late = asyncio.create_task(client.match_stream.match(query(1), timeout_s=5))
        stream = await index.streams.next()
        first = await next_match(stream)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        waiting = asyncio.create_task(client.match_stream.match(query(2)))
        stream.send(answer(first, 1))
        second = await next_match(stream)
        stream.send(answer(second, 2))
        assert (await waiting).matched_chunks == 2


async def test_a_silent_index_costs_the_deadline_and_the_stream() -> None:
    async with scripted() as (index, client):
        asked = asyncio.create_task(client.match_stream.match(query(1)))
        stream = await index.streams.next()
        stream.send(answer(await next_match(stream), 1))
        assert (await asked).matched_chunks == 1
        with pytest.raises(DeadlineExceeded):
            await client.match_stream.match(query(1), timeout_s=0.05)
        await asyncio.wait_for(stream.ended.wait(), PATIENCE_S)


async def test_a_closed_client_refuses() -> None:
    async with scripted() as (_, client):
        await client.match_stream.close()
        with pytest.raises(ServiceUnavailable, match="closed"):
            await client.match_stream.match(query(1))


async def test_an_index_that_is_not_there_fails_fast() -> None:
    client = IndexClient(test_config(index_endpoints=("127.0.0.1:1",)))
    try:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(ServiceUnavailable):
                await client.match_stream.match(query(1))
    finally:
        await client.close()


async def test_the_next_replica_serves_after_one_went_away() -> None:
    one, two = ScriptedIndex(), ScriptedIndex()  # type: ignore[abstract]
    add = index_pb2_grpc.add_IndexServiceServicer_to_server
    async with serve(add, one) as (first, endpoint), serve(add, two) as (_, other):
        client = IndexClient(test_config(index_endpoints=(endpoint, other)))
        try:
            asked = asyncio.create_task(client.match_stream.match(query(1)))
            await one.streams.next()
            await first.stop(None)
            with pytest.raises(ServiceUnavailable):
                await asked
            asked = asyncio.create_task(client.match_stream.match(query(1)))
            stream = await two.streams.next()
            stream.send(answer(await next_match(stream), 1))
            assert (await asked).matched_chunks == 1
        finally:
            await client.close()


async def test_no_task_outlives_the_client() -> None:
    before = asyncio.all_tasks()
    async with scripted() as (index, client):
        asked = asyncio.create_task(client.match_stream.match(query(1)))
        stream = await index.streams.next()
        stream.send(answer(await next_match(stream), 1))
        await asked
    await eventually(lambda: asyncio.all_tasks() <= before)
