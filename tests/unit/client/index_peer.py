"""A scripted index, and a node that is linked to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from typing import Any

from kvpool.client.index import IndexClient
from kvpool.core.cluster import LocationChange, NodeInfo, NodeKind, NodeLoad
from kvpool.core.errors import (
    KvPoolError,
    LeaseLost,
    StaleIncarnation,
)
from kvpool.core.keyspace import keyspace_id
from kvpool.core.location_digest import ChunkPlaces, HeldChunk
from kvpool.core.outcome import Tier
from kvpool.v1 import index_pb2, index_pb2_grpc
from kvpool.wire.convert import item_error_to_proto
from kvpool.wire.convert_cluster import held_chunks_from_proto, location_change_from_proto
from kvpool_server.node.node_link import NodeLink, NodeLinkConfig
from tests.fixtures.patience import PATIENCE_S
from tests.unit.client.servers import Script, Streams, refuse, serve, test_config

NODE_ID = bytes(range(16))
ENCODING = b"encoding"
KEYSPACE = keyspace_id(ENCODING)
LEASE_TTL_MS = 1000 * int(PATIENCE_S)


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
        self.loads: list[Any] = []
        self.lease_streams = 0
        self.ended: list[Any] = []
        self.dropped: list[bytes] = []
        self.stale: list[Any] = []
        self.renew_error: KvPoolError | None = None
        self.answers_renewals = asyncio.Event()
        self.answers_renewals.set()
        self.register_error: KvPoolError | None = None
        self.answers_registrations = asyncio.Event()
        self.answers_registrations.set()
        self.stale_error: KvPoolError | None = None
        self.reconcile_error: KvPoolError | None = None
        self.digests: dict[int, int] = {}  # by range
        self.encodings: list[bytes] = []
        self.compared = 0
        self.drop_time_s = 0.0  # what the caller of the latest drop gave it

    async def RegisterNode(self, request: Any, context: Any) -> Any:
        if self.register_error is not None:
            await refuse(context, self.register_error)
        self.registered.append(request)
        await self.answers_registrations.wait()
        return index_pb2.RegisterNodeResponse(
            incarnation=request.node.incarnation or 41 + len(self.registered),
            lease_ttl_ms=LEASE_TTL_MS,
            renew_interval_ms=10,
            announce_epoch=len(self.registered),
        )

    async def RenewLeases(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        self.lease_streams += 1
        async for request in request_iterator:
            assert len(request.renewals) == 1
            self.loads.append(request.renewals[0].load if request.renewals[0].HasField("load") else None)
            error, refused = self.renew_error, []
            self.renewals += 1
            await self.answers_renewals.wait()
            if isinstance(error, LeaseLost | StaleIncarnation):
                if isinstance(error, LeaseLost):
                    self.renew_error = None
                refused = [index_pb2.RefusedRenewal(error=item_error_to_proto(error))]
            elif error is not None:
                await refuse(context, error)
            yield index_pb2.RenewLeasesResponse(
                lease_ttl_ms=LEASE_TTL_MS,
                renew_interval_ms=10,
                idle_lease_ttl_ms=LEASE_TTL_MS,
                idle_renew_interval_ms=10,
                refused=refused,
            )

    async def EndLease(self, request: Any, context: Any) -> Any:
        self.ended.append(request)
        return index_pb2.EndLeaseResponse()

    async def GetIndexInfo(self, request: Any, context: Any) -> Any:
        return index_pb2.GetIndexInfoResponse(max_batch_items=4)

    async def ReconcileDigests(self, request: Any, context: Any) -> Any:
        if self.reconcile_error is not None:
            error, self.reconcile_error = self.reconcile_error, None
            await refuse(context, error)
        self.encodings += request.keyspace_encodings
        self.compared += 1
        ranges = range(request.first_range, request.first_range + request.range_count)
        return index_pb2.ReconcileDigestsResponse(digests=[self.digests.get(number, 0) for number in ranges])

    async def ReconcileSplitGroups(self, request: Any, context: Any) -> Any:
        return index_pb2.ReconcileSplitGroupsResponse()

    async def DropKeyspaceLocations(self, request: Any, context: Any) -> Any:
        self.dropped.append(request.keyspace_id)
        self.drop_time_s = context.time_remaining()
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

    def __init__(
        self, index: ScriptedIndex, client: IndexClient, truth: dict[int, int] | None = None, **bounds: Any
    ) -> None:
        self.index, self.client = index, client
        self.truth = dict(truth or {})
        self.located = 0
        self.on_locate: Callable[[], None] = lambda: None
        self.superseded: list[StaleIncarnation] = []
        self.load_errors: list[Exception] = []
        self.link = NodeLink(
            client,
            NodeInfo(node_id=NODE_ID, kind=NodeKind.PAGESTORE, endpoint="127.0.0.1:1"),
            last_incarnation=7,
            load=self.load,
            truth=self,
            on_superseded=self.superseded.append,
            config=NodeLinkConfig(
                **{"linger_s": 0.001, "stale_linger_s": 0.001, "ack_timeout_s": PATIENCE_S, "end_timeout_s": PATIENCE_S}
                | bounds
            ),
        )

    def load(self) -> NodeLoad:
        if self.load_errors:
            raise self.load_errors.pop()
        return NodeLoad(page_count=len(self.truth))

    def chunks(self) -> list[ChunkPlaces]:
        return [ChunkPlaces(KEYSPACE, bytes([chunk]) * 16, bytes(16)) for chunk in self.truth]

    def locate(self, keyspace: bytes, chunk_hashes: Collection[bytes]) -> Iterator[tuple[bytes, HeldChunk]]:
        for chunk_hash in chunk_hashes:
            self.located += 1
            self.on_locate()
            shards = self.truth.get(chunk_hash[0], 0)
            if keyspace == KEYSPACE and shards:
                yield chunk_hash, HeldChunk(bytes(16), (0, shards, 0), 0b11)

    def keyspace_encodings(self) -> list[bytes]:
        return [ENCODING, b"of a keyspace without chunks"]


@asynccontextmanager
async def node(truth: dict[int, int] | None = None, **bounds: Any) -> AsyncGenerator[Node]:
    index = ScriptedIndex()  # type: ignore[abstract]
    async with serve(index_pb2_grpc.add_IndexServiceServicer_to_server, index) as (_, endpoint):
        client = IndexClient(test_config(index_endpoints=(endpoint,)))
        one = Node(index, client, truth, **bounds)
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
    sequence = request.batch.sequence or request.replace_range.sequence
    stream.send(index_pb2.AnnounceResponse(acknowledged_sequence=sequence))


def chunks(request: Any) -> list[int]:
    """Of a batch, or of a range that was reported as a whole."""
    changes = map(location_change_from_proto, request.batch.changes)
    return sorted(one.chunk_hash[0] for one in (*changes, *held(request)))


def held(request: Any) -> list[LocationChange]:
    """What a range that was reported as a whole has."""
    return held_chunks_from_proto(request.replace_range.held, most=1 << 20)
