"""A node's link to a scripted index: leases, announcements, reconnects."""

from __future__ import annotations

import asyncio

import pytest

from kvpool.client.index import IndexClient
from kvpool.core.cluster import NodeInfo, NodeKind, NodeLoad, RemoteSource
from kvpool.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LeaseLost,
    StaleIncarnation,
    StoreFault,
    StoreUnavailable,
    WireVersionRefused,
)
from kvpool.core.outcome import Tier
from kvpool.core.page import PageKey
from kvpool.testing import eventually
from kvpool.v1 import index_pb2_grpc
from kvpool_server.node.chunk_directory import NoLocations
from kvpool_server.node.node_link import NodeLink
from tests.fixtures.patience import PATIENCE_S
from tests.unit.client.index_peer import (
    KEYSPACE,
    NODE_ID,
    Node,
    ScriptedIndex,
    acknowledge,
    change,
    chunks,
    held,
    node,
    opened,
)
from tests.unit.client.servers import serve, test_config


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


async def test_what_the_index_does_not_know_is_reported_by_ranges_at_start() -> None:
    async with node(truth=dict.fromkeys(range(4), 1)) as one:
        await one.link.start()
        stream = await opened(one)
        waiting = asyncio.create_task(one.link.wait_announced())
        request = await stream.next("replace_range")
        assert chunks(request) == [0, 1, 2, 3]
        assert (request.replace_range.first_bucket, request.replace_range.last_bucket) == (0, 15)
        assert not waiting.done(), "until then the index may lack what it was sent"
        acknowledge(stream, request)
        await asyncio.wait_for(waiting, PATIENCE_S)
        assert one.index.encodings == [b"encoding"]


async def test_wait_announced_waits_for_the_acknowledgement() -> None:
    async with node() as one:
        await one.link.start()
        stream = await opened(one)
        one.link.announce([change(1)])
        waiting = asyncio.create_task(one.link.wait_announced())
        request = await stream.next("batch")
        assert not waiting.done()
        acknowledge(stream, request)
        await asyncio.wait_for(waiting, PATIENCE_S)
        await asyncio.wait_for(one.link.wait_announced(), PATIENCE_S)


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
        await eventually(lambda: one.link.reconciler.round_count)
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


async def test_a_lost_lease_is_registered_again_and_everything_reported_again() -> None:
    async with node() as one:
        await one.link.start()
        stream = await opened(one)
        one.truth = {5: 0b11}
        one.link.announce([change(5, 0b11)])
        acknowledge(stream, await stream.next("batch"))
        one.index.renew_error = LeaseLost("expired")
        await eventually(lambda: len(one.index.registered) == 2)
        assert one.index.registered[1].node.incarnation == 42
        stream = await opened(one)
        request = await stream.next("replace_range")
        assert [(item.chunk_hash[0], item.added_shards) for item in held(request)] == [(5, 0b11)]


async def test_a_stream_that_says_lease_lost_registers_again() -> None:
    async with node() as one:
        await one.link.start()
        stream = await opened(one)
        stream.end(LeaseLost("fenced"))
        await opened(one)
        assert len(one.index.registered) == 2
        compared = one.index.compared
        await eventually(lambda: one.index.compared > compared)


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
        await asyncio.wait_for(stream.ended.wait(), PATIENCE_S)
        await one.link.close()
        assert len(one.superseded) == 1
        assert one.index.ended == [], "the lease belongs to the newer process"


async def test_start_waits_for_the_index_and_gives_up_in_time() -> None:
    async with node() as one:
        one.index.register_error = StoreUnavailable("redis is away")
        with pytest.raises(DeadlineExceeded):
            await one.link.start(timeout_s=0.05)
        one.index.register_error = None
        lease = await one.link.start(timeout_s=PATIENCE_S)
        # How often the impatient start asked is its own business; the last answer is what counts.
        assert lease.incarnation == one.link.incarnation == 41 + len(one.index.registered)


async def test_start_raises_what_waiting_cannot_cure() -> None:
    async with node() as one:
        one.index.register_error = InvalidRequest("bad endpoint")
        with pytest.raises(InvalidRequest):
            await one.link.start()


async def test_an_update_that_fails_leaves_the_node_as_it_was() -> None:
    async with node() as one:
        await one.link.start()
        index, drained = one.index, NodeInfo(node_id=NODE_ID, kind=NodeKind.PAGESTORE, endpoint="h:1", draining=True)
        index.answers_registrations.clear()
        updating = asyncio.create_task(one.link.update(drained))
        await eventually(lambda: len(index.registered) == 2)
        updating.cancel()
        await asyncio.gather(updating, return_exceptions=True)
        assert index.registered[-1].node.draining, "its answer was lost"
        index.answers_registrations.set()
        await eventually(lambda: not index.registered[-1].node.draining)
        renewals = index.renewals
        await eventually(lambda: index.renewals >= renewals + 3)
        assert len(index.registered) == 3
        await one.link.update(drained)
        assert index.registered[-1].node.draining


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
            stream = await one.index.streams.next()
            request = await stream.next("batch")
            assert chunks(request) == [1]
            acknowledge(stream, request)
            await asyncio.wait_for(one.link.wait_announced(), PATIENCE_S)
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


async def test_a_node_that_an_older_index_refuses_registers_once_that_was_upgraded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with node() as one:
        one.index.register_error = WireVersionRefused("the node is 9.0.0 (wire versions 8 to 9), this side is 0.1.0")
        starting = asyncio.create_task(one.link.start())
        await eventually(lambda: "the index did not register this node" in caplog.text)
        one.index.register_error = None
        assert (await asyncio.wait_for(starting, PATIENCE_S)).incarnation == 42
        assert "upgrade the older side" in caplog.text
        await one.link.close()


async def test_nothing_is_announced_under_an_incarnation_that_was_not_adopted() -> None:
    async with node(truth=dict.fromkeys(range(4), 1)) as one:
        adopted: list[int] = []

        async def adopt(incarnation: int) -> None:
            adopted.append(incarnation)
            if len(adopted) == 1:
                raise StoreFault("planted: the disk is full")

        with pytest.raises(StoreFault):
            await one.link.start(adopt=adopt)
        assert (one.link.incarnation, one.index.renewals, one.index.streams.count) == (0, 0, 0)
        lease = await one.link.start(adopt=adopt)
        assert adopted[-1] == lease.incarnation == one.link.incarnation
        assert chunks(await (await opened(one)).next("replace_range")) == [0, 1, 2, 3]
        await one.link.close()


async def test_an_unforeseen_error_does_not_end_the_lease(caplog: pytest.LogCaptureFixture) -> None:
    async with node() as one:
        one.load_errors.append(RuntimeError("planted"))
        await one.link.start()
        await eventually(lambda: one.index.renewals >= 3)
        assert "lease failed and starts again" in caplog.text
        await one.link.close()


async def test_a_node_that_holds_nothing_renews_without_a_load() -> None:
    async with node() as one:
        one.link = NodeLink(
            one.client,
            NodeInfo(node_id=NODE_ID, kind=NodeKind.AGENT, endpoint="127.0.0.1:1"),
            load=NodeLoad,
            truth=NoLocations(),
            on_superseded=one.superseded.append,
        )
        await one.link.start()
        await eventually(lambda: one.index.renewals >= 3)
        assert one.index.loads[:3] == [None] * 3 and one.index.lease_streams == 1
