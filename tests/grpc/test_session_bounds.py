"""Sessions of a pagestore stay responsive and bounded, whatever its disk and its peers do."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from kvpool.client.page_items import AcquireItem, ReserveItem, acquire_to_proto, reserve_to_proto
from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import DeadlineExceeded, KvPoolError, Overloaded
from kvpool.core.page import PageKey
from kvpool.testing import eventually
from kvpool.testing.page_store import MemoryPageStore
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.wire.convert import item_error_from_proto
from kvpool_pagestore.core.stored_pages import StoredPages
from tests.fixtures.pagestore import PAGE_BYTES, TENANT, metadata, new_world, page_key
from tests.fixtures.pagestore_server import Served, served
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.raw_peer import RawPeer, raw_peer
from tests.fixtures.standstill import stood_still


class SlowSyncs(MemoryPageStore[StoredPages]):
    """Metadata is synced only once `release` is set."""

    def __init__(self) -> None:
        super().__init__(StoredPages.of)
        self.begun, self.release = threading.Event(), threading.Event()

    def set_metadata(self, changes: Sequence[tuple[PageKey, PageMetadata]]) -> None:
        self.begun.set()
        self.release.wait(PATIENCE_S)
        super().set_metadata(changes)


def reserve(*numbers: int, prompt_tokens: int = 0) -> pb.ReserveRequest:
    items = [
        ReserveItem(page_key(number), PAGE_BYTES, replace(metadata(number), prompt_tokens=prompt_tokens))
        for number in numbers
    ]
    return reserve_to_proto(items)


async def store_one(store: Served, number: int) -> None:
    """Have a page in staging and on disk."""
    async with raw_peer(store.endpoint) as peer:
        await peer.open()
        await peer.send(2, reserve=reserve(number))
        lease_id = (await peer.next_of("reserve")).reserve.results[0].slot.lease_id
        await peer.send(3, commit=pb.CommitRequest(lease_ids=[lease_id], unsealed=True))
        assert not (await peer.next_of("commit")).commit.results[0].HasField("error")
        await peer.send(0, close=pb.SessionClose())
        await peer.next_of("closed")
    await store.running.engine.flush(TENANT, b"")


@asynccontextmanager
async def with_a_slow_sync(store: Served, syncs: SlowSyncs) -> AsyncIterator[RawPeer]:
    """A peer whose request 2 waits for the disk: it stores a page that is there already, for a longer prompt."""
    await store_one(store, 1)
    try:
        async with raw_peer(store.endpoint) as peer:
            await peer.open()
            await peer.send(2, reserve=reserve(1, prompt_tokens=4096))
            await eventually(syncs.begun.is_set)
            yield peer
    finally:
        syncs.release.set()


async def test_a_slow_metadata_sync_does_not_end_a_healthy_session() -> None:
    syncs = SlowSyncs()
    with new_world(store=syncs) as world:
        async with served(world) as store, with_a_slow_sync(store, syncs) as peer:
            await peer.send(0, heartbeat=pb.SessionHeartbeat())
            await peer.next_of("heartbeat")
            await peer.send(3, reserve=reserve(2))
            answer = await peer.next_of("reserve")
            assert answer.request_id == 3 and answer.reserve.results[0].admission == pb.ADMISSION_RESERVED
            await peer.send(4, abort=pb.AbortRequest(lease_ids=[answer.reserve.results[0].slot.lease_id]))
            await peer.next_of("abort")
            syncs.release.set()
            answer = await peer.next_of("reserve")
            assert answer.request_id == 2 and answer.reserve.results[0].admission == pb.ADMISSION_EXISTS


async def test_requests_beyond_the_limit_are_refused_and_heartbeats_are_heard() -> None:
    syncs = SlowSyncs()
    with new_world(store=syncs) as world:
        async with (
            served(world, max_requests_in_flight=1) as store,
            with_a_slow_sync(store, syncs) as peer,
        ):
            await peer.send(3, reserve=reserve(2))
            answer = await peer.next_of("error")
            assert answer.request_id == 3 and isinstance(item_error_from_proto(answer.error), Overloaded)
            await peer.send(0, heartbeat=pb.SessionHeartbeat())
            await peer.next_of("heartbeat")
            await peer.send(4, release=pb.ReleaseRequest(lease_ids=[77]))
            await peer.next_of("release")  # what gives back is never refused
            syncs.release.set()
            assert (await peer.next_of("reserve")).request_id == 2
            await peer.send(5, reserve=reserve(2))
            assert (await peer.next_of("reserve")).request_id == 5


async def test_what_a_session_says_first_is_begun_first() -> None:
    """Nothing is awaited between the messages: an abort or a release is done before what follows it is begun."""
    with new_world() as world:
        async with served(world) as store, raw_peer(store.endpoint) as peer:
            await peer.open()
            await peer.send(2, reserve=reserve(1))
            lease_id = (await peer.next_of("reserve")).reserve.results[0].slot.lease_id
            await peer.send(3, abort=pb.AbortRequest(lease_ids=[lease_id]))
            await peer.send(4, reserve=reserve(1))
            await peer.next_of("abort")
            result = (await peer.next_of("reserve")).reserve.results[0]
            assert result.admission == pb.ADMISSION_RESERVED
            await peer.send(5, commit=pb.CommitRequest(lease_ids=[result.slot.lease_id], unsealed=True))
            await peer.send(6, abort=pb.AbortRequest(lease_ids=[result.slot.lease_id]))
            answers = {answer.request_id: answer for answer in [await peer.next(), await peer.next()]}
            assert not answers[5].commit.results[0].HasField("error"), "the commit had begun, the abort is void"
            await peer.send(7, reserve=reserve(1))
            assert (await peer.next_of("reserve")).reserve.results[0].admission == pb.ADMISSION_EXISTS


async def test_reads_end_with_a_request_before_it_is_served_and_on_their_own_without_an_answer() -> None:
    with new_world() as world:
        async with served(world) as store, raw_peer(store.endpoint) as peer:
            await peer.open()
            leases = store.running.engine.gauges
            await peer.send(2, reserve=reserve(1))
            written = (await peer.next_of("reserve")).reserve.results[0].slot.lease_id
            await peer.send(3, commit=pb.CommitRequest(lease_ids=[written], unsealed=True))
            await peer.next_of("commit")
            first = await acquired(peer, 4)
            second = await acquired(peer, 5, released_lease_ids=[first])
            assert leases().leases == 1
            await peer.send(6, abort=pb.AbortRequest(), released_lease_ids=[second])
            await peer.next_of("abort")
            assert leases().leases == 0
            third = await acquired(peer, 7)
            await peer.send(0, release=pb.ReleaseRequest(lease_ids=[third]))
            await peer.send(0, abort=pb.AbortRequest())
            await peer.send(8, reserve=reserve(1))
            assert (await peer.next_of("reserve")).request_id == 8
            assert leases().leases == 0


async def test_reads_end_with_a_request_that_is_refused() -> None:
    syncs = SlowSyncs()
    with new_world(store=syncs) as world:
        async with (
            served(world, max_requests_in_flight=2) as store,
            with_a_slow_sync(store, syncs) as peer,
        ):
            lease_id = await acquired(peer, 3)
            held = store.running.engine.gauges().leases
            await peer.send(4, reserve=reserve(1, prompt_tokens=8192))
            await peer.send(5, reserve=reserve(2), released_lease_ids=[lease_id])
            assert (await peer.next_of("error")).request_id == 5
            assert store.running.engine.gauges().leases == held - 1
            syncs.release.set()


async def acquired(peer: RawPeer, request_id: int, **more: object) -> int:
    """The lease of page 1, read."""
    items = acquire_to_proto([AcquireItem(page_key(1))], 1000)
    await peer.send(request_id, acquire=items, **more)
    lease_id: int = (await peer.next_of("acquire")).acquire.results[0].slot.lease_id
    assert lease_id
    return lease_id


async def test_a_stream_that_opens_no_session_is_ended() -> None:
    with new_world() as world:
        async with served(world, heartbeat_interval_ms=20) as store, raw_peer(store.endpoint) as peer:
            assert isinstance(await peer.end(), DeadlineExceeded)


async def test_a_peer_that_is_silent_is_given_up_and_what_it_held_is_quarantined() -> None:
    with new_world() as world:
        async with served(world, heartbeat_interval_ms=20) as store:

            async def was_opened() -> bool:
                """Not so if this machine stood still."""
                async with raw_peer(store.endpoint) as peer:
                    try:
                        await peer.open()
                    except Exception:
                        return False
                    error = await peer.end()
                    assert isinstance(error, DeadlineExceeded) and "silent for 0.08 s" in error.message, error
                return True

            await eventually(was_opened)
            assert store.running.engine.gauges().sessions == 0
            assert store.running.metric("ended_sessions_total", manner="abnormal") >= 1


async def test_a_store_that_stood_still_hears_its_peers_before_it_judges_them() -> None:
    with new_world() as world:
        async with served(world) as store, raw_peer(store.endpoint) as peer:
            await peer.open()
            stood_still(3600.0)
            await peer.send(0, heartbeat=pb.SessionHeartbeat())
            await peer.next_of("heartbeat")
            await peer.send(0, close=pb.SessionClose())
            await peer.next_of("closed")
            assert await peer.end() is None


async def open_many(
    store: Served, endpoint: str, count: int
) -> tuple[list[RawPeer], list[KvPoolError], AsyncExitStack]:
    peers, refusals, stack = list[RawPeer](), list[KvPoolError](), AsyncExitStack()
    for _ in range(count):
        peer = await stack.enter_async_context(raw_peer(endpoint))
        await peer.send(1, open=pb.SessionOpen())
        answer: object = None
        try:
            answer = await peer.next()
        except Exception:
            error = await peer.end()
            assert error is not None
            refusals.append(error)
        if answer is not None:
            peers.append(peer)
    return peers, refusals, stack


async def test_one_address_cannot_take_all_sessions() -> None:
    with new_world() as world:
        async with served(world, max_sessions=8) as store:
            peers, refusals, stack = await open_many(store, store.node.endpoint, 6)
            async with stack:
                assert len(peers) == 4 and [type(error) for error in refusals] == [Overloaded] * 2
                assert "of one peer" in refusals[0].message
                session = await store.open()
                assert await session.close()
                await peers[0].send(0, close=pb.SessionClose())
                await peers[0].next_of("closed")
                again, refused, more = await open_many(store, store.node.endpoint, 1)
                async with more:
                    assert len(again) == 1 and not refused, "a session that has ended counts no more"


async def test_one_process_of_this_host_cannot_take_all_sessions() -> None:
    """gRPC does not say which process a unix socket's peer is; the descriptor socket does."""
    with new_world() as world:
        async with served(world, max_sessions=8) as store:
            sessions = [await store.open() for _ in range(4)]
            with pytest.raises(Overloaded, match="of one process"):
                await store.open()
            other = await store.open(wants_arena=False)
            for session in (*sessions, other):
                assert await session.close()
            session = await store.open()
            assert await session.close()
