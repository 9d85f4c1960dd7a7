"""Matches over gRPC: unary and on a stream, as nodes come and go."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest

from kvpool.core import errors
from kvpool.testing import ManualClock, eventually
from kvpool.v1 import common_pb2, index_pb2
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.config import IndexConfig
from kvpool_index.core.entries import GroupRead
from tests.fixtures.index_node import (
    DISK,
    GPU,
    GRID,
    SHARD_COUNT,
    STAGING,
    Chain,
    FakeNode,
    of_rank,
    open_keyspace,
    refusal,
)
from tests.fixtures.index_server import RunningIndex, running_index


class GatedStore(MemoryIndexStore):
    """A store whose reads of one chain wait until they are let go."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.gate = asyncio.Event()
        self.held_head = b""
        self._read = self.locations.read
        self.locations.read = self._gated  # type: ignore[method-assign]

    async def _gated(self, keyspace: bytes, groups: Sequence[GroupRead]) -> list[bytes | None]:
        if groups and groups[0].head == self.held_head:
            await self.gate.wait()
        return await self._read(keyspace, groups)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> GatedStore:
    return GatedStore(clock)


@pytest.fixture
async def index(clock: ManualClock, store: GatedStore) -> AsyncIterator[RunningIndex]:
    config = IndexConfig(max_match_chunks=64, lease_ttl_ms=500)
    async with running_index(store, clock=clock, config=config) as running:
        yield running


def places(match: index_pb2.MatchResponse) -> list[tuple[int, list[tuple[bytes, int, int]]]]:
    return [
        (run.chunk_count, [(place.node_id[:1], place.tier, place.shards) for place in run.locations])
        for run in match.runs
    ]


async def test_the_union_of_nodes_covers(index: RunningIndex) -> None:
    chain = Chain(await open_keyspace(index.stub))
    a = await FakeNode(index.stub, b"a" * 16, host_id="east").register()
    b = await FakeNode(index.stub, b"b" * 16, host_id="west").register()
    low, high = GRID & 0xFF, GRID & ~0xFF
    await a.announce([*chain.added(range(20), shards=low), *chain.added(range(3), tier=GPU)])
    await b.announce([*chain.added(range(18), shards=high), *chain.added(range(2), tier=DISK)])
    match = await index.stub.Match(chain.query(host_id="west"))
    assert match.matched_chunks == 18
    assert places(match) == [
        (2, [(b"b", STAGING, high), (b"b", DISK, GRID), (b"a", STAGING, low), (b"a", GPU, GRID)]),
        (1, [(b"b", STAGING, high), (b"a", STAGING, low), (b"a", GPU, GRID)]),
        (15, [(b"b", STAGING, high), (b"a", STAGING, low)]),
    ]
    assert {node.node_id[:1]: node.incarnation for node in match.nodes} == {b"a": a.incarnation, b"b": b.incarnation}
    assert (await index.stub.Match(chain.query(shards=0b1))).matched_chunks == 20
    assert index.metric("kvpool_index_chunks_matched_total", tier="staging") == 38
    assert index.metric("kvpool_index_chunks_asked_total") == 80


async def test_pages_of_another_tp_degree_count(index: RunningIndex) -> None:
    chain = Chain(await open_keyspace(index.stub))
    a, b = await FakeNode(index.stub, b"a" * 16).register(), await FakeNode(index.stub, b"b" * 16).register()
    await a.announce([*chain.added(range(8), shards=of_rank(2, 0)), *chain.added(range(8, 12))])
    await b.announce(chain.added(range(4), shards=of_rank(2, 1)))

    async def asked(shards: int, first: int = 0) -> tuple[int, list[bytes]]:
        found = await index.stub.Match(chain.query(first=first, shards=shards))
        return found.matched_chunks, [place.node_id[:1] for place in found.runs[0].locations] if found.runs else []

    # TP 2 stored, TP 1 and TP 4 ask; of chunks 4 to 7 only the first rank's half is there.
    assert await asked(0) == (4, [b"a", b"b"])
    assert await asked(0, first=4) == (0, [])
    assert await asked(of_rank(4, 1), first=0) == (12, [b"a"])
    assert await asked(of_rank(4, 2), first=0) == (4, [b"b"])
    assert await asked(of_rank(4, 2), first=4) == (0, [])
    # TP 1 stored, TP 4 asks.
    for rank in range(4):
        assert await asked(of_rank(4, rank), first=8) == (4, [b"a"])


async def test_a_query_may_start_anywhere(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce(chain.added(range(40)))
    for first in (0, 1, 15, 16, 17, 32, 39):
        assert (await index.stub.Match(chain.query(first=first))).matched_chunks == 40 - first
    assert (await index.stub.Match(chain.query(0))).matched_chunks == 0
    assert (await index.stub.Match(chain.query(0, first=3))).matched_chunks == 0


async def test_malformed_questions(index: RunningIndex) -> None:
    chain = Chain(await open_keyspace(index.stub))
    cut, many, headless, wide, unknown = (chain.query() for _ in range(5))
    cut.chunk_hashes += b"x"
    many.chunk_hashes = bytes(65 * 16)
    headless.first_chunk_index, headless.group_head_hash = 3, b""
    wide.shards = 1 << SHARD_COUNT
    unknown.keyspace_id = bytes(16)
    for bad, named in ((cut, "40"), (many, "64"), (headless, "group_head_hash"), (wide, "shard")):
        error = await refusal(index.stub.Match(bad))
        assert isinstance(error, errors.InvalidRequest) and named in error.message
        assert error.item_index == (40 if bad is cut else None)
    call = index.stub.Match(unknown)
    assert isinstance(await refusal(call), errors.KeyspaceUnknown)
    assert await call.code() is grpc.StatusCode.NOT_FOUND


async def test_a_stream_answers_errors_and_goes_on(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce(chain.added(range(5)))
    bad, unknown = chain.query(), chain.query()
    bad.chunk_hashes += b"x"
    unknown.keyspace_id = bytes(16)
    stream = index.stub.MatchStream()
    answers = {}
    for number, query in enumerate((bad, chain.query(), unknown, chain.query(3)), start=100):
        await stream.write(index_pb2.MatchStreamRequest(request_id=number, match=query))
    for _ in range(4):
        answer = await stream.read()
        assert isinstance(answer, index_pb2.MatchStreamResponse)
        answers[answer.request_id] = answer
    assert answers[100].error.reason == "INVALID_REQUEST" and "40" in answers[100].error.message
    assert answers[102].error.reason == "KEYSPACE_UNKNOWN" and not answers[102].HasField("match")
    assert answers[101].match.matched_chunks == 5 and not answers[101].HasField("error")
    assert answers[103].match.matched_chunks == 3
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK


async def test_a_slow_match_does_not_hold_up_its_stream(index: RunningIndex, store: GatedStore) -> None:
    slow, fast = Chain(await open_keyspace(index.stub)), Chain(await open_keyspace(index.stub))
    node = await FakeNode(index.stub).register()
    await node.announce(fast.added(range(5)))
    store.held_head = slow.hashes[0]
    stream = index.stub.MatchStream()
    await stream.write(index_pb2.MatchStreamRequest(request_id=1, match=slow.query()))
    for number in (2, 3):
        await stream.write(index_pb2.MatchStreamRequest(request_id=number, match=fast.query()))
        answer = await stream.read()
        assert isinstance(answer, index_pb2.MatchStreamResponse)
        assert (answer.request_id, answer.match.matched_chunks) == (number, 5)
    store.gate.set()
    last = await stream.read()
    assert isinstance(last, index_pb2.MatchStreamResponse) and last.request_id == 1
    stream.cancel()


async def test_locations_leave_with_the_lease(index: RunningIndex, clock: ManualClock) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    other = await FakeNode(index.stub).register()
    await node.announce(chain.added(range(5)))
    await other.announce(chain.added(range(2)))
    clock.advance(0.4)
    await other.renew()
    assert (await index.stub.Match(chain.query())).matched_chunks == 5
    clock.advance(0.2)
    assert (await index.stub.Match(chain.query())).matched_chunks == 2, "by the local clock, before any poll"
    await eventually(lambda: index.metric("kvpool_index_node_events_total", event="died") == 1)
    assert index.metric("kvpool_index_live_nodes", kind="pagestore") == 1
    await other.end()
    assert (await index.stub.Match(chain.query())).matched_chunks == 0


async def test_what_will_never_be_answered_again_is_cleaned_up(index: RunningIndex, store: GatedStore) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce(chain.added(range(20)))
    await node.register(new_incarnation=True)
    assert (await index.stub.Match(chain.query())).matched_chunks == 0
    await eventually(lambda: index.metric("kvpool_index_dead_locations_removed_total") == 20)
    reads = [GroupRead(chain.hashes[0], [each[:8] for each in chain.hashes[:16]])]
    assert await store.locations.read(chain.keyspace, reads) == [None] * 16


async def test_a_lease_that_only_ran_out_is_not_cleaned_up(index: RunningIndex, clock: ManualClock) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce(chain.added(range(5)))
    clock.advance(1.0)
    await eventually(lambda: index.metric("kvpool_index_node_events_total", event="died") == 1)
    assert (await index.stub.Match(chain.query())).matched_chunks == 0
    await node.register()
    assert (await index.stub.Match(chain.query())).matched_chunks == 5


async def test_a_node_registered_elsewhere_is_found_at_once(clock: ManualClock) -> None:
    store = MemoryIndexStore(clock)
    async with running_index(store, clock=clock) as one, running_index(store, clock=clock) as two:
        chain = Chain(await open_keyspace(one.stub))
        for _ in range(3):
            node = await FakeNode(one.stub).register()
            await node.announce(chain.added(range(4)))
            clock.advance(0.3)
            match = await two.stub.Match(chain.query())
            assert match.matched_chunks == 4 and node.node_id in {each.node_id for each in match.nodes}
            stale = common_pb2.Location(
                node_id=node.node_id, incarnation=node.incarnation, tier=common_pb2.TIER_STAGING, shards=1
            )
            report = index_pb2.StaleLocation(
                keyspace_id=chain.keyspace,
                chunk_hash=chain.hashes[0],
                group_head_hash=chain.hashes[0],
                location=stale,
            )
            answer = await two.stub.ReportStale(index_pb2.ReportStaleRequest(locations=[report]))
            assert list(answer.removed) == [True]
            await node.end()
