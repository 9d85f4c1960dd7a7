"""A client's replica on a real index: matches without a call, and never from the past."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from kvpool.client.index import IndexClient
from kvpool.core.cluster import ChainMatch, ChainQuery, HeartbeatEvent
from kvpool.core.errors import KeyspaceUnknown, ServiceUnavailable, StoreUnavailable
from kvpool.core.grid import ShardGrid
from kvpool.testing import ManualClock, eventually
from kvpool.v1 import index_pb2
from kvpool.wire.convert_keyspace import spec_from_proto
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.config import IndexConfig
from kvpool_index.engine import watch as engine_watch
from kvpool_server.node import replica_feed
from kvpool_server.node.replica_feed import LocationReplica, MatchedBy, ReplicaConfig
from tests.fixtures.index_node import TIMEOUT_S, Chain, FakeNode, of_rank, open_keyspace, spec
from tests.fixtures.index_server import RunningIndex, running_index
from tests.fixtures.patience import patient


class Asking:
    """A replica of a running index, and who answered."""

    def __init__(self, index: RunningIndex, keyspace: bytes) -> None:
        self.clock = ManualClock()
        self.client = IndexClient(patient(index_endpoints=(index.endpoint,)))
        self.answered_by: list[MatchedBy] = []
        self.heard = 0  # events
        self.replica = LocationReplica(
            self.client,
            ReplicaConfig(),
            clock=self.clock,
            on_match=self.answered_by.append,
            on_event=self._hear,
        )
        self.replica.open_keyspace(keyspace, ShardGrid.of(spec_from_proto(spec())))

    def _hear(self, replica: LocationReplica) -> None:
        self.heard += 1

    async def match(self, chain: Chain, count: int = 40, first: int = 0, shards: int = 0) -> ChainMatch:
        return await self.replica.match(
            ChainQuery(
                keyspace=chain.keyspace,
                chunk_hashes=b"".join(chain.hashes[first : first + count]),
                first_chunk_index=first,
                group_head_hash=chain.hashes[first // 16 * 16],
                shards=shards,
            )
        )

    async def last(self, chain: Chain, first: int = 0) -> MatchedBy:
        """Who answers a match now."""
        await self.match(chain, first=first)
        return self.answered_by[-1]

    async def matches(self, chain: Chain, chunk_count: int) -> bool:
        """Whether a match now finds just so many chunks."""
        return (await self.match(chain)).matched_chunks == chunk_count


@asynccontextmanager
async def asking(index: RunningIndex, keyspace: bytes) -> AsyncIterator[Asking]:
    one = Asking(index, keyspace)
    try:
        yield one
    finally:
        await one.replica.close()
        await one.client.close()


@pytest.fixture
def index_clock() -> ManualClock:
    """It stamps what a replica judges by its age: nothing is old because this machine stood still."""
    return ManualClock()


@pytest.fixture
def index_store(index_clock: ManualClock) -> MemoryIndexStore:
    return MemoryIndexStore(index_clock)


@pytest.fixture
async def index(index_clock: ManualClock, index_store: MemoryIndexStore) -> AsyncIterator[RunningIndex]:
    config = IndexConfig(lease_ttl_ms=600_000)
    async with running_index(index_store, clock=index_clock, config=config) as running:
        yield running


async def test_it_learns_from_answers_and_from_the_watch(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce(chain.added(range(20)))
    async with asking(index, chain.keyspace) as one:
        await eventually(lambda: one.replica.is_current)
        first = await one.match(chain, 20)
        assert (first.matched_chunks, one.answered_by) == (20, [MatchedBy.INDEX])
        assert await one.match(chain, 20) == first
        assert one.answered_by[-1] is MatchedBy.REPLICA
        assert await one.last(chain) is MatchedBy.BOTH, "the rest is asked for"
        await node.register()
        await node.announce(chain.added(range(20, 40)))
        await eventually(lambda: one.replica.group_count == 3)
        whole = await one.match(chain)
        assert (whole.matched_chunks, one.answered_by[-1]) == (40, MatchedBy.REPLICA)
        assert len(whole.runs) == 1 and set(whole.nodes) == {node.node_id}


async def test_pages_of_another_tp_degree_count_as_they_do_at_the_index(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce([*chain.added(range(8), shards=of_rank(2, 0)), *chain.added(range(4), shards=of_rank(2, 1))])
    async with asking(index, chain.keyspace) as one:
        await eventually(lambda: one.replica.is_current)
        for shards, found in ((0, 4), (of_rank(4, 1), 8), (of_rank(4, 2), 4), (of_rank(2, 1), 4)):
            asked = await one.match(chain, 20, shards=shards)
            assert (asked.matched_chunks, await one.match(chain, 20, shards=shards)) == (found, asked)
            known = await one.match(chain, found, shards=shards)
            assert (known.matched_chunks, one.answered_by[-1]) == (found, MatchedBy.REPLICA)


async def test_the_rest_of_a_chain_is_joined_to_what_is_known(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce(chain.added(range(40)))
    async with asking(index, chain.keyspace) as one:
        await eventually(lambda: one.replica.is_current)
        for known in (5, 16, 21):
            one.replica.forget(ChainQuery(keyspace=chain.keyspace, chunk_hashes=b"".join(chain.hashes)))
            await one.match(chain, known)
            joined = await one.match(chain)
            assert (joined.matched_chunks, len(joined.runs), one.answered_by[-1]) == (40, 1, MatchedBy.BOTH)
            assert await one.last(chain, first=19) is MatchedBy.REPLICA


async def test_what_is_removed_or_dies_is_not_named(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce(chain.added(range(40)))
    async with asking(index, chain.keyspace) as one:
        await eventually(lambda: one.replica.is_current)
        await one.match(chain)
        assert await one.last(chain) is MatchedBy.REPLICA
        await node.register()
        await node.announce(chain.removed([30]))
        await eventually(lambda: one.matches(chain, 30))
        await node.end()
        await eventually(lambda: one.matches(chain, 0))
        assert one.answered_by[-1] is MatchedBy.INDEX


async def test_a_silent_index_is_not_trusted(index: RunningIndex, index_clock: ManualClock) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce(chain.added(range(40)))
    async with asking(index, chain.keyspace) as one:
        await eventually(lambda: one.replica.is_current)
        await one.match(chain)
        one.clock.advance(3.1)
        index_clock.advance(3.1)
        assert await one.last(chain) is MatchedBy.INDEX
        await eventually(lambda: one.replica.is_current)
        assert await one.last(chain) is MatchedBy.REPLICA


async def test_what_was_sent_while_we_were_stopped_is_as_old_as_it_is(
    index: RunningIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is continued finds heartbeats of long ago, one after the other; those say nothing of now."""
    monkeypatch.setattr(engine_watch, "_HEARTBEAT_S", 0.01)
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce(chain.added(range(40)))
    async with asking(index, chain.keyspace) as one:
        await eventually(lambda: one.replica.is_current)
        await one.match(chain)
        one.clock.advance(60.0)
        heard = one.heard
        await eventually(lambda: one.heard >= heard + 3)
        assert not one.replica.is_current
        assert await one.last(chain) is MatchedBy.INDEX


async def test_a_watch_that_took_long_to_open_is_opened_again(
    index: RunningIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats would seem old for days, because it is not known when the index opened it."""
    monkeypatch.setattr(engine_watch, "_HEARTBEAT_S", 0.01)
    clock, asked = ManualClock(), list[float]()

    def now_s() -> float:
        asked.append(clock.monotonic_s())
        if len(asked) == 1:
            clock.advance(40.0)
        return asked[-1]

    client = IndexClient(patient(index_endpoints=(index.endpoint,), backoff_initial_s=0.01))
    ages_ms = list[int]()
    async with aclosing(client.watch(for_replica=True, now_s=now_s)) as events:
        async for event in events:
            if isinstance(event.event, HeartbeatEvent):
                ages_ms.append(event.event.age_ms)
                if len(ages_ms) == 3:
                    break
                clock.advance(6.0)
    await client.close()
    assert min(ages_ms[:2]) > 39_000 and ages_ms[2] < 1000


async def test_without_the_index_what_is_known_is_still_answered(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce(chain.added(range(20)))
    async with asking(index, chain.keyspace) as one:
        await eventually(lambda: one.replica.is_current)
        await one.match(chain, 20)
        index.engine.streams.end_all()
        await one.client.match_stream.close()
        assert (await one.match(chain)).matched_chunks == 20
        one.clock.advance(10.0)
        with pytest.raises(ServiceUnavailable):
            await one.match(chain)


async def test_what_is_stored_nowhere_is_no_question_for_the_index(index: RunningIndex) -> None:
    keyspace = await open_keyspace(index.stub)
    stored, other, node = Chain(keyspace), Chain(keyspace), await FakeNode(index.stub).register()
    await node.announce(stored.added(range(32)))
    async with asking(index, keyspace) as one:
        await eventually(lambda: one.replica.is_current and one.replica.listing_count)
        asked = index.metric("kvpool_index_match_questions_total")
        assert (await one.match(other)).matched_chunks == 0
        assert one.answered_by == [MatchedBy.ABSENT]
        assert index.metric("kvpool_index_match_questions_total") == asked
        assert (await one.match(stored)).matched_chunks == 32, "what was stored before the replica began is found"
        assert await one.last(stored) is MatchedBy.ABSENT, "32 chunks are known, and the third group is nowhere"
        await node.register()
        await node.announce(stored.added(range(32, 40)))
        await node.register()
        await node.announce(other.added(range(4)))
        await eventually(lambda: one.matches(other, 4))
        await eventually(lambda: one.matches(stored, 40))


async def test_absence_is_as_recent_as_its_bound_says(index: RunningIndex, index_clock: ManualClock) -> None:
    keyspace = await open_keyspace(index.stub)
    async with asking(index, keyspace) as one:
        await eventually(lambda: one.replica.is_current and one.replica.listing_count)
        assert await one.last(Chain(keyspace)) is MatchedBy.ABSENT
        for clock in (one.clock, index_clock):
            clock.advance(1.6)
        assert await one.last(Chain(keyspace)) is MatchedBy.INDEX
        assert one.replica.is_current, "what is there may be used for longer"


async def test_what_was_stored_from_here_is_asked_for_before_its_event_comes(index: RunningIndex) -> None:
    keyspace = await open_keyspace(index.stub)
    chain = Chain(keyspace)
    async with asking(index, keyspace) as one:
        await eventually(lambda: one.replica.is_current and one.replica.listing_count)
        assert await one.last(chain) is MatchedBy.ABSENT
        one.replica.note_stored(ChainQuery(keyspace=keyspace, chunk_hashes=b"".join(chain.hashes[:16])))
        assert await one.last(chain) is MatchedBy.INDEX


async def test_a_listing_that_fails_is_tried_again_and_meanwhile_the_index_is_asked(
    index: RunningIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_feed, "_LIST_AGAIN_S", 0.01)
    keyspace = await open_keyspace(index.stub)
    chain_groups, failed = index.engine.chain_groups, asyncio.Event()

    async def fail_once(tenant: str, keyspace: bytes) -> bytes:
        if not failed.is_set():
            failed.set()
            raise StoreUnavailable("Redis is away")
        await again.wait()
        return await chain_groups(tenant, keyspace)

    again = asyncio.Event()
    monkeypatch.setattr(index.engine, "chain_groups", fail_once)
    async with asking(index, keyspace) as one:
        await failed.wait()
        await eventually(lambda: one.replica.is_current)
        assert await one.last(Chain(keyspace)) is MatchedBy.INDEX
        again.set()
        await eventually(lambda: one.replica.listing_count)
        await eventually(lambda: one.replica.is_current)
        assert await one.last(Chain(keyspace)) is MatchedBy.ABSENT


async def test_a_keyspace_opened_later_is_listed_too(index: RunningIndex) -> None:
    first = await open_keyspace(index.stub)
    another = index_pb2.OpenKeyspaceRequest(name="later", spec=spec(model_id="another"))
    second = (await index.stub.OpenKeyspace(another, timeout=TIMEOUT_S)).keyspace_id
    node = await FakeNode(index.stub).register()
    stored = Chain(second)
    await node.announce(stored.added(range(40)))
    async with asking(index, first) as one:
        await eventually(lambda: one.replica.listing_count)
        assert await one.last(stored) is MatchedBy.INDEX
        one.replica.open_keyspace(second, ShardGrid.of(spec_from_proto(spec())))
        await eventually(lambda: one.replica.listing_count == 2)
        assert (await one.match(stored)).matched_chunks == 40
        assert await one.last(Chain(second)) is MatchedBy.ABSENT


async def test_groups_are_listed_once_for_all_who_wait(
    index: RunningIndex, index_store: MemoryIndexStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce(chain.added(range(40)))
    reads, may_read = 0, asyncio.Event()
    group_heads = index_store.locations.group_heads

    async def counted(keyspace: bytes) -> AsyncIterator[list[bytes]]:
        nonlocal reads
        reads += 1
        await may_read.wait()
        async for some in group_heads(keyspace):
            yield some

    monkeypatch.setattr(index_store.locations, "group_heads", counted)
    first = asyncio.ensure_future(index.engine.chain_groups("default", chain.keyspace))
    await eventually(lambda: reads)
    others = [asyncio.ensure_future(index.engine.chain_groups("default", chain.keyspace)) for _ in range(5)]
    for _ in range(10):  # a store in memory answers at once, so that all have asked by then
        await asyncio.sleep(0)
    may_read.set()
    assert {await each for each in (first, *others)} == {b"".join(chain.hashes[at] for at in (0, 16, 32))}
    assert reads == 2, "those who asked while the first was read share one that began later"


async def test_groups_of_a_keyspace_that_is_not_known_are_not_listed(index: RunningIndex) -> None:
    async with asking(index, await open_keyspace(index.stub)) as one:
        with pytest.raises(KeyspaceUnknown):
            await anext(one.client.list_chain_groups(secrets.token_bytes(16)))


@pytest.mark.parametrize("turns", range(6))
async def test_it_ends_although_a_listing_becomes_due_at_that_moment(index: RunningIndex, turns: int) -> None:
    """turns: of the event loop, between what makes it due and the end."""
    keyspace = await open_keyspace(index.stub)
    async with asking(index, keyspace) as one:
        await eventually(lambda: one.replica.is_current and one.replica.listing_count > 0)
        for _ in range(10):
            await asyncio.sleep(0)
        one.replica.open_keyspace(secrets.token_bytes(16), ShardGrid.of(spec_from_proto(spec())))
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await one.replica.close()


def test_bounds_are_checked() -> None:
    for wrong in ({"capacity_bytes": 0}, {"max_lag_s": 0.0}, {"max_absence_lag_s": 0.0}, {"list_every_s": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ReplicaConfig(**wrong)
