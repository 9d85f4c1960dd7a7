"""Several questions in one message of a match stream, over a real channel."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvpool.core.cluster import ChainMatch
from kvpool.core.errors import KvPoolError
from kvpool.testing import ManualClock, eventually
from kvpool.v1 import index_pb2
from kvpool.wire.convert_matches import answers_from_proto
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.config import IndexConfig
from tests.fixtures.index_node import SHARD_COUNT, Chain, FakeNode, open_keyspace
from tests.fixtures.index_server import RunningIndex, running_index

LIMITS = IndexConfig(max_match_chunks=64, max_match_questions=8)


@pytest.fixture
async def index() -> AsyncIterator[RunningIndex]:
    async with running_index(config=LIMITS) as running:
        yield running


def chain_of(query: index_pb2.MatchRequest) -> index_pb2.MatchChain:
    return index_pb2.MatchChain(
        chunk_hashes=query.chunk_hashes,
        first_chunk_index=query.first_chunk_index,
        group_head_hash=query.group_head_hash,
    )


async def ask(index: RunningIndex, *questions: index_pb2.MatchRequest) -> Any:
    stream = index.stub.MatchStream()
    more = [chain_of(query) for query in questions[1:]]
    await stream.write(index_pb2.MatchStreamRequest(request_id=5, match=questions[0], more=more))
    answer: Any = await stream.read()
    assert answer.request_id == 5
    await stream.write(index_pb2.MatchStreamRequest(request_id=6, match=questions[-1]))
    after: Any = await stream.read()
    assert after.request_id == 6, "the stream goes on"
    await stream.done_writing()
    return answer


def reported(answers: list[ChainMatch | KvPoolError]) -> list[int | str]:
    return [each.reason if isinstance(each, KvPoolError) else each.matched_chunks for each in answers]


async def test_each_question_has_its_own_answer_and_nodes_are_named_once(index: RunningIndex) -> None:
    keyspace = await open_keyspace(index.stub)
    here, there, nowhere = (Chain(keyspace) for _ in range(3))
    a = await FakeNode(index.stub, b"a" * 16).register()
    b = await FakeNode(index.stub, b"b" * 16).register()
    await a.announce(here.added(range(20)))
    await b.announce(there.added(range(5)))
    cut, headless, beyond = there.query(3), there.query(3), there.query(3)
    cut.chunk_hashes += b"x"
    headless.first_chunk_index, headless.group_head_hash = 3, b""
    beyond.group_head_hash = bytes(16)
    questions = [here.query(20), cut, there.query(7), nowhere.query(1), headless, here.query(2, first=17), beyond]
    answer = await ask(index, *questions)
    answers = answers_from_proto(answer)
    refused = "INVALID_REQUEST"
    assert reported(answers) == [20, refused, 5, 0, refused, 2, refused]
    named = [[node.node_id[:1] for node in one.match.nodes] for one in (answer, *answer.more)]
    assert named == [[b"a"], [], [b"b"], [], [], [], []]
    nodes = [sorted(each.nodes) for each in answers if isinstance(each, ChainMatch)]
    assert nodes == [[b"a" * 16], [b"b" * 16], [], [b"a" * 16]]
    assert index.metric("kvpool_index_match_questions_total") == 4
    assert index.metric("kvpool_index_match_duration_seconds_count") == 1


async def test_the_first_question_may_be_the_bad_one(index: RunningIndex) -> None:
    chain = Chain(await open_keyspace(index.stub))
    await (await FakeNode(index.stub).register()).announce(chain.added(range(5)))
    cut = chain.query(3)
    cut.chunk_hashes += b"x"
    assert reported(answers_from_proto(await ask(index, cut, chain.query(5)))) == ["INVALID_REQUEST", 5]
    assert reported(answers_from_proto(await ask(index, cut, cut))) == ["INVALID_REQUEST"] * 2


async def test_what_is_about_all_questions_is_said_once(index: RunningIndex) -> None:
    chain = Chain(await open_keyspace(index.stub))
    unknown, wide = chain.query(1), chain.query(1)
    unknown.keyspace_id = bytes(16)
    wide.shards = 1 << SHARD_COUNT
    for questions, reason, text in (
        ([chain.query(1)] * 9, "INVALID_REQUEST", "number of questions must be 0 to 8, got 9"),
        ([chain.query(33), chain.query(32)], "INVALID_REQUEST", "of all questions must be 0 to 64, got 65"),
        ([unknown] * 3, "KEYSPACE_UNKNOWN", ""),
        ([wide] * 3, "INVALID_REQUEST", "shard"),
    ):
        answer = await ask(index, *questions)
        assert not answer.more and not answer.HasField("match")
        assert answer.error.reason == reason and text in answer.error.message
    assert len((await ask(index, *[chain.query(8)] * 8)).more) == 7, "the limits themselves are served"


async def test_the_limit_is_reported(index: RunningIndex) -> None:
    assert (await index.stub.GetIndexInfo(index_pb2.GetIndexInfoRequest())).max_match_questions == 8


async def test_several_questions_are_one_round_of_the_store() -> None:
    store = MemoryIndexStore(ManualClock())
    rounds = list[int]()
    read_chains = store.locations.read_chains

    async def counted(queries: Any) -> Any:
        rounds.append(len(queries))
        return await read_chains(queries)

    store.locations.read_chains = counted  # type: ignore[method-assign]
    async with running_index(store, config=LIMITS) as index:
        chain = Chain(await open_keyspace(index.stub))
        await ask(index, *[chain.query(1)] * 8)
    assert rounds == [8]


async def test_what_will_never_be_answered_is_cleaned_up_from_every_question(index: RunningIndex) -> None:
    keyspace = await open_keyspace(index.stub)
    chains = [Chain(keyspace) for _ in range(3)]
    node = await FakeNode(index.stub).register()
    for chain in chains:
        await node.announce(chain.added(range(3)))
    await node.register(new_incarnation=True)
    assert reported(answers_from_proto(await ask(index, *(chain.query(3) for chain in chains)))) == [0, 0, 0]
    await eventually(lambda: index.metric("kvpool_index_dead_locations_removed_total") == 9)
