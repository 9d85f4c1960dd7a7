"""The stream of renewals, and what bounds nodes, keyspaces and watchers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvpool.core import errors
from kvpool.core.errors import KvPoolError
from kvpool.testing import ManualClock
from kvpool.v1 import index_pb2
from kvpool.wire.convert import item_error_from_proto
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.config import IndexConfig
from kvpool_index.core.nodes import Renewal
from tests.fixtures.index_node import FakeNode, open_keyspace, refusal
from tests.fixtures.index_server import running_index


def renewal(node: FakeNode, pages: int | None = None) -> index_pb2.LeaseToRenew:
    load = None if pages is None else index_pb2.NodeLoad(page_count=pages)
    return index_pb2.LeaseToRenew(node_id=node.node_id, incarnation=node.incarnation, load=load)


async def test_one_stream_renews_any_number_of_leases_and_a_refusal_does_not_end_it() -> None:
    clock = ManualClock()
    config = IndexConfig(lease_ttl_ms=5000, idle_lease_ttl_ms=30_000)
    async with running_index(MemoryIndexStore(clock), clock=clock, config=config) as index:
        busy, idle, gone = [await FakeNode(index.stub).register() for _ in range(3)]
        await gone.end()
        call = index.stub.RenewLeases()
        for _ in range(2):
            await call.write(index_pb2.RenewLeasesRequest(renewals=[renewal(busy, 3), renewal(gone), renewal(idle)]))
            answer = await call.read()
            assert isinstance(answer, index_pb2.RenewLeasesResponse)
            assert [each.index for each in answer.refused] == [1]
            assert isinstance(item_error_from_proto(answer.refused[0].error), errors.LeaseLost)
            assert (answer.lease_ttl_ms, answer.idle_lease_ttl_ms) == (5000, 30_000)
            assert (answer.renew_interval_ms, answer.idle_renew_interval_ms) == (1666, 10_000)
        clock.advance(20.0)
        alive = (await index.stub.ListNodes(index_pb2.ListNodesRequest())).nodes
        assert [node.info.node_id for node in alive] == [idle.node_id], "who holds nothing may be silent for longer"
        call.cancel()


async def test_renewals_of_a_moment_are_one_call_of_the_store() -> None:
    store = MemoryIndexStore(ManualClock())
    calls: list[int] = []
    renew = store.nodes.renew

    async def counted(renewals: Sequence[Renewal]) -> list[KvPoolError | None]:
        calls.append(len(renewals))
        return await renew(renewals)

    store.nodes.renew = counted  # type: ignore[method-assign]
    async with running_index(store) as index:
        nodes = [await FakeNode(index.stub).register() for _ in range(40)]
        streams = [index.stub.RenewLeases() for _ in nodes]

        async def renew_once(at: int) -> None:
            await streams[at].write(index_pb2.RenewLeasesRequest(renewals=[renewal(nodes[at])]))
            answer = await streams[at].read()
            assert isinstance(answer, index_pb2.RenewLeasesResponse) and not answer.refused

        await asyncio.gather(*map(renew_once, range(40)))
        assert sum(calls) == 40 and len(calls) < 20
        for stream in streams:
            stream.cancel()


async def test_nodes_and_keyspaces_are_bounded_and_those_that_are_there_go_on() -> None:
    async with running_index(config=IndexConfig(max_nodes=2, max_keyspaces=2)) as index:
        first, _ = [await FakeNode(index.stub).register() for _ in range(2)]
        await first.register()
        refused = index.stub.RegisterNode(
            index_pb2.RegisterNodeRequest(
                node=index_pb2.NodeInfo(node_id=b"x" * 16, kind=index_pb2.NODE_KIND_AGENT, endpoint="h:1")
            )
        )
        assert isinstance(await refusal(refused), errors.Overloaded)
        keyspace = await open_keyspace(index.stub, "one")
        await open_keyspace(index.stub, "two")
        assert await open_keyspace(index.stub, "one") == keyspace
        assert isinstance(await refusal(open_keyspace(index.stub, "three")), errors.Overloaded)


async def test_one_host_cannot_take_all_watchers() -> None:
    async with running_index(config=IndexConfig(max_peer_watchers=2)) as index:
        watches = [index.stub.Watch(index_pb2.WatchRequest(for_replica=True)) for _ in range(2)]
        for watch in watches:
            event = await watch.read()
            assert isinstance(event, index_pb2.WatchResponse) and event.HasField("resync")
        assert isinstance(await refusal(index.stub.Watch(index_pb2.WatchRequest()).read()), errors.Overloaded)
        for watch in watches:
            watch.cancel()
