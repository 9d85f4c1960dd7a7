"""A node's link to a scripted index: leases, announcements, reconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvpool.client.index import IndexClient
from kvpool.client.node_link import NodeLink, NodeLinkConfig
from kvpool.core.cluster import LocationChange, NodeInfo, NodeKind, NodeLoad, RemoteSource
from kvpool.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvPoolError,
    LeaseLost,
    StaleIncarnation,
    StoreUnavailable,
)
from kvpool.core.outcome import Tier
from kvpool.core.page import PageKey
from kvpool.testing import eventually
from kvpool.v1 import index_pb2, index_pb2_grpc
from tests.unit.client.servers import Script, Streams, refuse, serve, test_config

NODE_ID = bytes(range(16))
KEYSPACE = b"k" * 16


def change(chunk: int, added: int = 1, removed: int = 0) -> LocationChange:
    return LocationChange(
        keyspace=KEYSPACE,
        chunk_hash=bytes([chunk]) * 16,
        group_head_hash=bytes(16),
        tier=Tier.STAGING,
        added_shards=added,
        removed_shards=removed,
    )


class ScriptedIndex(index_pb2_grpc.IndexServiceServicer):
    """Grants leases; the test answers announcements, or has them stored and acknowledged by themselves."""

    def __init__(self) -> None:
        self.streams = Streams()
        self.registered: list[Any] = []
        self.renewals = 0
        self.ended: list[Any] = []
        self.dropped: list[bytes] = []
        self.stale: list[Any] = []
        self.renew_error: KvPoolError | None = None
        self.register_error: KvPoolError | None = None
        self.stale_error: KvPoolError | None = None

    async def RegisterNode(self, request: Any, context: Any) -> Any:
        if self.register_error is not None:
            await refuse(context, self.register_error)
        self.registered.append(request)
        return index_pb2.RegisterNodeResponse(
            incarnation=request.node.incarnation or 41 + len(self.registered),
            lease_ttl_ms=3000,
            renew_interval_ms=10,
            announce_epoch=len(self.registered),
        )

    async def RenewLease(self, request: Any, context: Any) -> Any:
        self.renewals += 1
        if self.renew_error is not None:
            error = self.renew_error
            if isinstance(error, LeaseLost):
                self.renew_error = None
            await refuse(context, error)
        return index_pb2.RenewLeaseResponse(lease_ttl_ms=3000)

    async def EndLease(self, request: Any, context: Any) -> Any:
        self.ended.append(request)
        return index_pb2.EndLeaseResponse()

    async def GetIndexInfo(self, request: Any, context: Any) -> Any:
        return index_pb2.GetIndexInfoResponse(max_batch_items=4)

    async def DropKeyspaceLocations(self, request: Any, context: Any) -> Any:
        self.dropped.append(request.keyspace_id)
        return index_pb2.DropKeyspaceLocationsResponse()

    async def ReportStale(self, request: Any, context: Any) -> Any:
        if self.stale_error is not None:
            error, self.stale_error = self.stale_error, None
            await refuse(context, error)
        self.stale.extend(request.locations)
        return index_pb2.ReportStaleResponse(removed=[True] * len(request.locations))

    async def Announce(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for message in self.streams.run(request_iterator, context):
            yield message


class Node:
    """The node under test."""

    def __init__(self, index: ScriptedIndex, client: IndexClient, **bounds: Any) -> None:
        self.index = index
        self.truth: dict[int, int] = {}
        self.snapshots = 0
        self.superseded: list[StaleIncarnation] = []
        self.link = NodeLink(
            client,
            NodeInfo(node_id=NODE_ID, kind=NodeKind.PAGESTORE, endpoint="127.0.0.1:1"),
            last_incarnation=7,
            load=NodeLoad,
            snapshot=self.snapshot,
            on_superseded=self.superseded.append,
            config=NodeLinkConfig(**{"linger_s": 0.001, "stale_linger_s": 0.001, **bounds}),
        )

    def snapshot(self) -> Iterator[LocationChange]:
        self.snapshots += 1
        for chunk in list(self.truth):
            yield change(chunk, self.truth[chunk])


@asynccontextmanager
async def node(**bounds: Any) -> AsyncGenerator[Node]:
    index = ScriptedIndex()  # type: ignore[abstract]
    async with serve(index_pb2_grpc.add_IndexServiceServicer_to_server, index) as (_, endpoint):
        client = IndexClient(test_config(index_endpoints=(endpoint,)))
        one = Node(index, client, **bounds)
        try:
            yield one
        finally:
            await one.link.close()
            await client.close()


async def opened(one: Node) -> Script:
    """The announce stream, after its first message."""
    stream = await one.index.streams.next()
    first = await stream.next("open")
    assert (first.open.node_id, first.open.incarnation) == (NODE_ID, one.link.incarnation)
    return stream


def acknowledge(stream: Script, request: Any) -> None:
    stream.send(index_pb2.AnnounceResponse(acknowledged_sequence=request.batch.sequence))


def chunks(request: Any) -> list[int]:
    return [one.chunk_hash[0] for one in request.batch.changes]


async def test_registers_renews_and_ends_the_lease() -> None:
    async with node() as one:
        lease = await one.link.start()
        assert (lease.incarnation, one.link.incarnation) == (42, 42)
        assert one.index.registered[0].last_incarnation == 7
        assert one.index.registered[0].node.incarnation == 0
        await eventually(lambda: one.index.renewals >= 3)
        await one.link.close()
        assert [(end.node_id, end.incarnation) for end in one.index.ended] == [(NODE_ID, 42)]
        await one.link.close()
        assert len(one.index.ended) == 1


async def test_everything_the_node_has_is_announced_at_start_in_limited_batches() -> None:
    async with node() as one:
        one.truth = dict.fromkeys(range(6), 1)
        await one.link.start()
        stream = await opened(one)
        first, second = await stream.next("batch"), await stream.next("batch")
        assert (chunks(first), chunks(second)) == ([0, 1, 2, 3], [4, 5])
        assert first.batch.sequence < second.batch.sequence


async def test_wait_announced_waits_for_the_acknowledgement() -> None:
    async with node() as one:
        await one.link.start()
        stream = await opened(one)
        one.link.announce([change(1)])
        waiting = asyncio.create_task(one.link.wait_announced())
        request = await stream.next("batch")
        assert not waiting.done()
        acknowledge(stream, request)
        await asyncio.wait_for(waiting, 5)
        await asyncio.wait_for(one.link.wait_announced(), 5)


async def test_wait_announced_says_when_it_cannot_tell() -> None:
    async with node() as one:
        await one.link.start()
        one.link.announce([change(1)])
        with pytest.raises(StoreUnavailable):
            await one.link.wait_announced(timeout_s=0.02)


async def test_unacknowledged_batches_are_sent_again_first_and_in_order() -> None:
    async with node(batch_max=1) as one:
        await one.link.start()
        stream = await opened(one)
        one.link.announce([change(1), change(2)])
        first, second = await stream.next("batch"), await stream.next("batch")
        acknowledge(stream, first)
        await eventually(lambda: one.link._queue.in_flight == 1)
        stream.end(StoreUnavailable("redis is away"))
        stream = await opened(one)
        one.link.announce([change(3)])
        again, third = await stream.next("batch"), await stream.next("batch")
        assert again == second
        assert chunks(third) == [3]
        assert len(one.index.registered) == 1, "a reconnect alone is no reason to register again"


async def test_a_lost_lease_is_registered_again_and_everything_told_again() -> None:
    async with node() as one:
        await one.link.start()
        await opened(one)
        one.truth = {5: 0b11}
        one.index.renew_error = LeaseLost("expired")
        await eventually(lambda: len(one.index.registered) == 2)
        assert one.index.registered[1].node.incarnation == 42
        stream = await opened(one)
        request = await stream.next("batch")
        assert [(item.chunk_hash[0], item.added_shards) for item in request.batch.changes] == [(5, 0b11)]
        assert one.snapshots == 2


async def test_a_stream_that_says_lease_lost_registers_again() -> None:
    async with node() as one:
        await one.link.start()
        stream = await opened(one)
        stream.end(LeaseLost("fenced"))
        await opened(one)
        assert len(one.index.registered) == 2
        await eventually(lambda: one.snapshots == 2)


@pytest.mark.parametrize("where", ["renew", "announce"])
async def test_a_newer_process_ends_the_link(where: str) -> None:
    async with node() as one:
        await one.link.start()
        stream = await opened(one)
        if where == "renew":
            one.index.renew_error = StaleIncarnation("newer")
        else:
            stream.end(StaleIncarnation("newer"))
        await eventually(lambda: one.superseded)
        with pytest.raises(StaleIncarnation):
            await one.link.wait_announced()
        await asyncio.wait_for(stream.ended.wait(), 5)
        await one.link.close()
        assert len(one.superseded) == 1
        assert one.index.ended == [], "the lease belongs to the newer process"


async def test_start_waits_for_the_index_and_gives_up_in_time() -> None:
    async with node() as one:
        one.index.register_error = StoreUnavailable("redis is away")
        with pytest.raises(DeadlineExceeded):
            await one.link.start(timeout_s=0.05)
        one.index.register_error = None
        assert (await one.link.start(timeout_s=5)).incarnation == 42


async def test_start_raises_what_waiting_cannot_cure() -> None:
    async with node() as one:
        one.index.register_error = InvalidRequest("bad endpoint")
        with pytest.raises(InvalidRequest):
            await one.link.start()


async def test_overflow_drops_the_keyspace_at_the_index_and_tells_the_truth() -> None:
    async with node(pending_max=2) as one:
        await one.link.start()
        stream = await opened(one)
        one.link.announce([change(1)])
        in_flight = await stream.next("batch")
        one.truth = {9: 0b1}
        one.link.announce([change(number, added=0, removed=1) for number in range(5)])
        assert one.link.pending_count == 0
        assert one.index.dropped == [], "a batch in flight could come after the drop"
        acknowledge(stream, in_flight)
        request = await stream.next("batch")
        assert one.index.dropped == [KEYSPACE]
        assert chunks(request) == [9]


async def test_a_refused_batch_does_not_block_later_ones_for_ever() -> None:
    async with node() as one:
        await one.link.start()
        stream = await opened(one)
        one.link.announce([change(1)])
        await stream.next("batch")
        one.truth = {2: 1}
        stream.end(InvalidRequest("malformed"))
        stream = await opened(one)
        request = await stream.next("batch")
        assert chunks(request) == [2]
        assert one.index.dropped == [KEYSPACE]


async def test_a_stream_without_acknowledgements_is_replaced() -> None:
    async with node(ack_timeout_s=0.05) as one:
        await one.link.start()
        stream = await opened(one)
        one.link.announce([change(1)])
        first = await stream.next("batch")
        stream = await opened(one)
        assert await stream.next("batch") == first


async def test_a_snapshot_that_fails_half_way_is_taken_again() -> None:
    async with node() as one:
        await one.link.start()
        await opened(one)
        good, failures = one.snapshot, 0

        def bad() -> Iterator[LocationChange]:
            nonlocal failures
            failures += 1
            yield change(1)
            raise RuntimeError("the ledger changed while it was read")

        one.link._announcer._snapshot = bad
        one.index.renew_error = LeaseLost("expired")
        await eventually(lambda: failures >= 2)
        one.truth = {1: 1, 2: 1}
        one.link._announcer._snapshot = good
        told: set[int] = set()
        while told < {1, 2}:
            stream = await one.index.streams.next()
            with contextlib.suppress(TimeoutError):
                told |= set(chunks(await stream.next("batch", timeout_s=0.2)))


async def test_stale_locations_are_reported_again_after_a_failure() -> None:
    async with node() as one:
        await one.link.start()
        one.index.stale_error = StoreUnavailable("redis is away")
        source = RemoteSource(node_id=b"n" * 16, incarnation=3, bulk_endpoint="127.0.0.1:2")
        one.link.report_stale(PageKey(KEYSPACE, b"c" * 16, 5), b"g" * 16, source)
        await eventually(lambda: len(one.index.stale) == 2)
        assert {item.location.shards for item in one.index.stale} == {1 << 5}
        assert {item.location.tier for item in one.index.stale} == {Tier.STAGING, Tier.DISK}


async def test_a_restarted_index_finds_the_node_again() -> None:
    add = index_pb2_grpc.add_IndexServiceServicer_to_server
    index = ScriptedIndex()  # type: ignore[abstract]
    async with serve(add, index) as (server, endpoint):
        client = IndexClient(test_config(index_endpoints=(endpoint,)))
        one = Node(index, client)
        await one.link.start()
        stream = await opened(one)
        one.link.announce([change(1)])
        await stream.next("batch")
        await server.stop(None)
    async with serve(add, index, address=endpoint):
        try:
            renewals = index.renewals
            stream = await one.index.streams.next(timeout_s=20)
            request = await stream.next("batch")
            assert chunks(request) == [1]
            acknowledge(stream, request)
            await asyncio.wait_for(one.link.wait_announced(), 5)
            await eventually(lambda: index.renewals > renewals)
        finally:
            await one.link.close()
            await client.close()


async def test_an_idle_link_does_nothing_but_renew() -> None:
    async with node() as one:
        await one.link.start()
        stream = await opened(one)
        await eventually(lambda: one.index.renewals >= 5)
        assert stream.received.empty()
        assert one.index.streams.count == 1
