"""Several questions in one message of a match stream, against a scripted index that knows of them or does not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvpool.client.match_stream import CHUNKS_MAX, QUESTIONS_MAX
from kvpool.core.cluster import ChainMatch, ChainQuery
from kvpool.core.errors import InvalidRequest, KeyspaceUnknown, KvPoolError, StoreUnavailable
from kvpool.testing import eventually
from kvpool.v1 import index_pb2
from kvpool.wire.convert import item_error_to_proto
from tests.fixtures.patience import PATIENCE_S
from tests.unit.client.servers import Script
from tests.unit.client.test_match_stream import HASH, answer, next_match, scripted


def alone(number: int, **changes: Any) -> ChainQuery:
    return replace(ChainQuery(keyspace=HASH, chunk_hashes=bytes([number % 256]) * 16), **changes)


def several(request: Any, *matched: int | KvPoolError) -> Any:
    """The answer to a message with as many questions."""
    one, *more = (
        index_pb2.MatchChainResult(error=item_error_to_proto(each))
        if isinstance(each, KvPoolError)
        else index_pb2.MatchChainResult(match=answer(request, each).match if each else index_pb2.MatchResponse())
        for each in matched
    )
    found = index_pb2.MatchStreamResponse(request_id=request.request_id, more=more)
    if one.HasField("error"):
        found.error.CopyFrom(one.error)
    else:
        found.match.CopyFrom(one.match)
    return found


def reported(answers: list[ChainMatch | KvPoolError]) -> list[int | str]:
    return [each.reason if isinstance(each, KvPoolError) else each.matched_chunks for each in answers]


async def test_several_questions_are_one_message_and_each_has_its_own_answer() -> None:
    async with scripted() as (index, client):
        queries = [alone(0), alone(1), alone(2, first_chunk_index=17, group_head_hash=HASH), alone(3)]
        asked = asyncio.create_task(client.match_stream.match_many(queries))
        stream = await index.streams.next()
        request = await next_match(stream)
        assert request.match.chunk_hashes == queries[0].chunk_hashes
        assert [(each.chunk_hashes, each.first_chunk_index) for each in request.more] == [
            (each.chunk_hashes, each.first_chunk_index) for each in queries[1:]
        ]
        stream.send(several(request, 1, InvalidRequest("cut off"), 0, 1))
        assert reported(await asked) == [1, "INVALID_REQUEST", 0, 1]
        asked = asyncio.create_task(client.match_stream.match_many(queries))
        stream.send(several(await next_match(stream), InvalidRequest("cut off"), 1, 1, 1))
        assert reported(await asked) == ["INVALID_REQUEST", 1, 1, 1]
        assert await client.match_stream.match_many([]) == []


async def test_questions_of_other_keyspaces_and_too_many_go_in_messages_of_their_own() -> None:
    async with scripted() as (index, client):
        other = bytes(16)
        queries = [alone(0), alone(1, keyspace=other), alone(2, keyspace=other), alone(3, keyspace=other, host_id="h")]
        long = ChainQuery(keyspace=HASH, chunk_hashes=HASH * (CHUNKS_MAX - 1))
        queries += [long, alone(4), alone(5), *map(alone, range(QUESTIONS_MAX))]
        asked = asyncio.create_task(client.match_stream.match_many(queries))
        stream = await index.streams.next()
        sizes = []
        for _ in range(6):
            request = await next_match(stream)
            sizes.append(1 + len(request.more))
            stream.send(several(request, *[1] * sizes[-1]))
        assert sizes == [1, 2, 1, 2, QUESTIONS_MAX, 1]
        assert reported(await asked) == [1] * len(queries)


async def answer_singly(stream: Script, count: int) -> set[bytes]:
    """As an index does that knows of no further questions."""
    seen = set()
    for _ in range(count):
        request = await next_match(stream)
        seen.add(request.match.chunk_hashes[:1])
        stream.send(answer(request, 1))
    return seen


async def test_an_index_that_knows_of_one_question_is_asked_one_by_one_until_the_next_stream() -> None:
    async with scripted() as (index, client):
        asked = asyncio.create_task(client.match_stream.match_many([alone(0), alone(1), alone(2)]))
        stream = await index.streams.next()
        assert await answer_singly(stream, 4) == {b"\0", b"\1", b"\2"}
        assert reported(await asked) == [1, 1, 1]
        asked = asyncio.create_task(client.match_stream.match_many([alone(3), alone(4)]))
        assert await answer_singly(stream, 2) == {b"\3", b"\4"}, "it is not tried again"
        await asked
        stream.end()
        matches: Any = client.match_stream
        await eventually(lambda: matches._stream.failure is not None)
        asked = asyncio.create_task(client.match_stream.match_many([alone(5), alone(6)]))
        stream = await index.streams.next()
        request = await next_match(stream)
        assert len(request.more) == 1
        stream.send(several(request, 1, 0))
        assert reported(await asked) == [1, 0]


@pytest.mark.parametrize("error", [KeyspaceUnknown("k"), StoreUnavailable("redis")])
async def test_what_is_about_all_questions_is_the_answer_of_each(error: KvPoolError) -> None:
    async with scripted() as (index, client):
        asked = asyncio.create_task(client.match_stream.match_many([alone(0), alone(1)]))
        stream = await index.streams.next()
        stream.send(several(await next_match(stream), error))
        assert reported(await asked) == [error.reason] * 2


async def test_what_an_index_does_not_take_at_once_is_asked_one_by_one() -> None:
    async with scripted() as (index, client):
        asked = asyncio.create_task(client.match_stream.match_many([alone(0), alone(1)]))
        stream = await index.streams.next()
        for last in (False, True):  # it may be about these questions only, so that the next ones go together again
            request = await next_match(stream)
            assert len(request.more) == 1
            stream.send(several(request, InvalidRequest("number of questions must be 0 to 1, got 2")))
            assert await answer_singly(stream, 2) == {b"\0", b"\1"}
            assert reported(await asked) == [1, 1]
            if not last:
                asked = asyncio.create_task(client.match_stream.match_many([alone(0), alone(1)]))


async def test_a_lost_answer_costs_several_questions_their_deadline_and_not_more() -> None:
    async with scripted() as (index, client):
        asked = asyncio.create_task(client.match_stream.match_many([alone(0), alone(1)]))
        stream = await index.streams.next()
        stream.send(several(await next_match(stream), 1, 1))
        assert reported(await asked) == [1, 1]
        queries = list(map(alone, range(QUESTIONS_MAX + 1)))
        assert set(reported(await client.match_stream.match_many(queries, timeout_s=0.05))) <= {
            "DEADLINE_EXCEEDED",
            "SERVICE_UNAVAILABLE",  # of the second message, when the first has given up the silent stream
        }
        await asyncio.wait_for(stream.ended.wait(), PATIENCE_S)


async def test_cancelled_questions_give_their_place_back_once_they_are_answered() -> None:
    async with scripted(requests_in_flight_max=1) as (index, client):
        late = asyncio.create_task(client.match_stream.match_many([alone(0), alone(1)]))
        stream = await index.streams.next()
        first = await next_match(stream)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        waiting = asyncio.create_task(client.match_stream.match_many([alone(2), alone(3)]))
        stream.send(several(first, 1, 1))
        stream.send(several(await next_match(stream), 1, 0))
        assert reported(await waiting) == [1, 0]
