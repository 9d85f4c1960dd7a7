"""The gRPC face of the index: converts, calls the engine, converts back."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, cast

import grpc

from kvpool.core import cluster
from kvpool.core.addresses import peer_host
from kvpool.core.cluster import ChunkBatch, IndexEvent
from kvpool.core.errors import InvalidRequest
from kvpool.core.location_digest import PART_BATCHES
from kvpool.v1 import index_pb2 as pb
from kvpool.v1 import index_pb2_grpc as pb_grpc
from kvpool.wire import (
    convert,
    convert_cluster,
    convert_grid,
    convert_index_info,
    convert_keyspace,
    convert_policy,
    convert_route,
    versions,
)
from kvpool.wire.convert_watch import chunk_batch_to_proto, index_event_to_proto
from kvpool.wire.frames import varint
from kvpool_index.core.nodes import Renewal
from kvpool_index.core.replacement import BucketSpan
from kvpool_index.engine.index import IndexEngine
from kvpool_index.servicer_match import MatchAnswers, serve_concurrently
from kvpool_server.logs import fields

_log = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Context: TypeAlias = grpc.aio.ServicerContext[RequestT, ResponseT]


ConvertedT = TypeVar("ConvertedT")


async def _converted_ahead(
    requests: AsyncIterator[RequestT], convert_one: Callable[[RequestT], ConvertedT]
) -> AsyncGenerator[tuple[RequestT, ConvertedT], None]:
    """Each request with what it is converted to. One is read and converted while the caller waits for the store."""

    reader = aiter(requests)

    async def take() -> tuple[RequestT, ConvertedT] | None:
        request = await anext(reader, None)
        return None if request is None else (request, convert_one(request))

    taking = asyncio.create_task(take())
    try:
        while (taken := await taking) is not None:
            taking = asyncio.create_task(take())
            yield taken
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


class IndexServicer(pb_grpc.IndexServiceServicer):
    """IndexService. `tenant_of_call` returns the authenticated tenant of the current call."""

    def __init__(self, engine: IndexEngine, tenant_of_call: Callable[[], str]) -> None:
        self._engine = engine
        self._tenant = tenant_of_call
        self._max_chunks = engine.config.max_match_chunks
        self._max_items = engine.config.max_batch_items
        self._watch_messages = WatchMessages()
        self._answers = MatchAnswers(engine)

    async def OpenKeyspace(
        self, request: pb.OpenKeyspaceRequest, context: Context[pb.OpenKeyspaceRequest, pb.OpenKeyspaceResponse]
    ) -> pb.OpenKeyspaceResponse:
        versions.check_peer_version(request.version, "the caller")
        spec = convert_keyspace.spec_from_proto(request.spec)
        opened = await self._engine.keyspaces.open(self._tenant(), request.name, spec)
        return pb.OpenKeyspaceResponse(
            keyspace_id=opened.keyspace.keyspace_id,
            hash_key=opened.hash_key,
            grid=convert_grid.grid_to_proto(opened.keyspace.grid),
            created=opened.created,
            version=versions.own_version_to_proto(),
        )

    async def ListKeyspaces(
        self, request: pb.ListKeyspacesRequest, context: Context[pb.ListKeyspacesRequest, pb.ListKeyspacesResponse]
    ) -> pb.ListKeyspacesResponse:
        known = await self._engine.keyspaces.of_tenant(self._tenant())
        policies = await self._engine.policies.of([each.keyspace_id for each in known])
        return pb.ListKeyspacesResponse(
            keyspaces=[
                pb.Keyspace(
                    name=each.name,
                    keyspace_id=each.keyspace_id,
                    spec=convert_keyspace.spec_to_proto(each.spec),
                    policy=convert_policy.optional_policy_to_proto(policies.get(each.keyspace_id)),
                )
                for each in known
            ]
        )

    async def SetKeyspacePolicy(
        self,
        request: pb.SetKeyspacePolicyRequest,
        context: Context[pb.SetKeyspacePolicyRequest, pb.SetKeyspacePolicyResponse],
    ) -> pb.SetKeyspacePolicyResponse:
        policy = convert_policy.policy_from_proto(request.policy)
        stored = await self._engine.policies.set(self._tenant(), request.name, policy)
        return pb.SetKeyspacePolicyResponse(keyspace_id=stored.keyspace, version=stored.version)

    async def GetKeyspacePolicies(
        self,
        request: pb.GetKeyspacePoliciesRequest,
        context: Context[pb.GetKeyspacePoliciesRequest, pb.GetKeyspacePoliciesResponse],
    ) -> pb.GetKeyspacePoliciesResponse:
        policies, version = await self._engine.policies.get(
            convert.convert_items(request.keyspace_ids, convert_keyspace.keyspace_id_from_proto, most=self._max_items)
        )
        return pb.GetKeyspacePoliciesResponse(
            policies=[convert_policy.versioned_policy_to_proto(one) for one in policies], policy_version=version
        )

    async def RestoreKeyspacePolicies(
        self,
        request: pb.RestoreKeyspacePoliciesRequest,
        context: Context[pb.RestoreKeyspacePoliciesRequest, pb.RestoreKeyspacePoliciesResponse],
    ) -> pb.RestoreKeyspacePoliciesResponse:
        kept = convert.convert_items(
            request.policies, convert_policy.kept_policy_from_proto, "policy", most=self._max_items
        )
        node_id = convert.check_id(request.node_id, "node_id")
        await self._engine.policies.restore(self._tenant(), node_id, request.incarnation, kept)
        return pb.RestoreKeyspacePoliciesResponse()

    async def RegisterNode(
        self, request: pb.RegisterNodeRequest, context: Context[pb.RegisterNodeRequest, pb.RegisterNodeResponse]
    ) -> pb.RegisterNodeResponse:
        versions.check_peer_version(request.version, "the node")
        info = convert_cluster.node_info_from_proto(request.node)
        attempt = cluster.RegistrationAttempt(process_id=request.process_id, number=request.attempt)
        lease = await self._engine.nodes.register(info, request.last_incarnation, attempt)
        peer = versions.versions_from_proto(request.version)
        facts = fields(node_id=info.node_id, endpoint=info.endpoint, peer=str(peer), incarnation=lease.incarnation)
        _log.info("node registered", extra=facts)
        return pb.RegisterNodeResponse(
            incarnation=lease.incarnation,
            lease_ttl_ms=lease.lease_ttl_ms,
            renew_interval_ms=lease.renew_interval_ms,
            announce_epoch=lease.announce_epoch,
            version=versions.own_version_to_proto(),
        )

    async def RenewLeases(  # type: ignore[override]  # a coroutine, as below: a large cluster has ten thousand streams
        self,
        request_iterator: AsyncIterator[pb.RenewLeasesRequest],
        context: Context[pb.RenewLeasesRequest, pb.RenewLeasesResponse],
    ) -> None:
        async with self._engine.streams.track():
            async for request in request_iterator:
                renewals = convert.convert_items(request.renewals, _renewal, "renewal", most=self._max_items)
                refusals, terms = await self._engine.leases.renew(renewals)
                answer = pb.RenewLeasesResponse(
                    lease_ttl_ms=terms.lease_ttl_ms,
                    renew_interval_ms=terms.renew_interval_ms,
                    idle_lease_ttl_ms=terms.idle_lease_ttl_ms,
                    idle_renew_interval_ms=terms.idle_renew_interval_ms,
                    policy_version=terms.policy_version,
                    refused=[
                        pb.RefusedRenewal(index=index, error=convert.item_error_to_proto(error))
                        for index, error in enumerate(refusals)
                        if error is not None
                    ],
                )
                await context.write(answer)

    async def EndLease(
        self, request: pb.EndLeaseRequest, context: Context[pb.EndLeaseRequest, pb.EndLeaseResponse]
    ) -> pb.EndLeaseResponse:
        node_id = convert.check_id(request.node_id, "node_id")
        await self._engine.nodes.end(node_id, request.incarnation, request.process_id)
        return pb.EndLeaseResponse()

    async def ListNodes(
        self, request: pb.ListNodesRequest, context: Context[pb.ListNodesRequest, pb.ListNodesResponse]
    ) -> pb.ListNodesResponse:
        kind = convert.enum_from_proto(request.kind, cluster.NodeKind, "kind") if request.kind else None
        nodes = await self._engine.nodes.live_nodes(kind)
        return pb.ListNodesResponse(nodes=[convert_cluster.live_node_to_proto(node) for node in nodes])

    async def Announce(
        self,
        request_iterator: AsyncIterator[pb.AnnounceRequest],
        context: Context[pb.AnnounceRequest, pb.AnnounceResponse],
    ) -> AsyncIterator[pb.AnnounceResponse]:
        async with self._engine.streams.track():
            stream = None
            async with aclosing(_converted_ahead(request_iterator, self._announced)) as announced:
                async for request, changes in announced:
                    match request.WhichOneof("kind"):
                        case "open" if stream is None:
                            stream = await self._engine.open_announce(
                                convert.check_id(request.open.node_id, "node_id"),
                                request.open.incarnation,
                                request.open.announce_epoch,
                                request.open.process_id,
                            )
                            continue
                        case "batch" if stream is not None:
                            applied = await stream.apply(request.batch.sequence, changes)
                        case "replace_range" if stream is not None:
                            part = request.replace_range
                            span = BucketSpan(part.first_bucket, part.last_bucket)
                            applied = await stream.replace(part.sequence, span, changes)
                        case "replace_part" if stream is not None:
                            held = convert_cluster.part_span_from_proto(request.replace_part)
                            applied = await stream.replace_part(request.replace_part.sequence, held, changes)
                        case _:
                            raise InvalidRequest("an Announce stream is one open, and then batches, ranges and parts")
                    yield pb.AnnounceResponse(acknowledged_sequence=applied)

    def _announced(self, request: pb.AnnounceRequest) -> list[cluster.LocationChange]:
        """The changes that a request of an announce stream carries. Raises InvalidRequest."""
        match request.WhichOneof("kind"):
            case "batch":
                convert_one = convert_cluster.location_change_from_proto
                return convert.convert_items(request.batch.changes, convert_one, "change", most=self._max_items)
            case "replace_range":
                return convert_cluster.held_chunks_from_proto(request.replace_range.held, most=self._max_items)
            case "replace_part":
                most = self._max_items * PART_BATCHES
                return convert_cluster.held_chunks_from_proto(request.replace_part.held, most=most)
        return []

    async def Match(
        self, request: pb.MatchRequest, context: Context[pb.MatchRequest, pb.MatchResponse]
    ) -> pb.MatchResponse:
        query = convert_cluster.chain_query_from_proto(request, chunks_max=self._max_chunks)
        return convert_cluster.chain_match_to_proto(await self._engine.matches.match(self._tenant(), query))

    async def MatchStream(  # type: ignore[override]  # see add_index_servicer: answers are bytes, and written
        self,  # by a coroutine, which costs less than a generator
        request_iterator: AsyncIterator[pb.MatchStreamRequest],
        context: Context[pb.MatchStreamRequest, bytes],
    ) -> None:
        answer = partial(self._answers.answer, self._tenant())
        limit = self._engine.config.max_matches_in_flight
        async with self._engine.streams.track():
            await serve_concurrently(request_iterator, answer, context.write, limit=limit)

    async def Place(
        self, request: pb.PlaceRequest, context: Context[pb.PlaceRequest, pb.PlaceResponse]
    ) -> pb.PlaceResponse:
        nodes = await self._engine.place(
            self._tenant(),
            convert.check_id(request.keyspace_id, "keyspace_id"),
            convert.check_id(request.chain_head_hash, "chain_head_hash"),
            request.host_id,
            request.count,
        )
        return pb.PlaceResponse(nodes=[convert_cluster.node_info_to_proto(node) for node in nodes])

    async def ReportStale(
        self, request: pb.ReportStaleRequest, context: Context[pb.ReportStaleRequest, pb.ReportStaleResponse]
    ) -> pb.ReportStaleResponse:
        stale = convert.convert_items(
            request.locations, convert_cluster.stale_location_from_proto, "location", most=self._max_items
        )
        return pb.ReportStaleResponse(removed=await self._engine.announcements.report_stale(self._tenant(), stale))

    async def Watch(  # type: ignore[override]  # see add_index_servicer: answers are bytes
        self, request: pb.WatchRequest, context: Context[pb.WatchRequest, pb.WatchResponse]
    ) -> AsyncIterator[bytes]:
        keyspace = convert.check_optional_id(request.keyspace_id, "keyspace_id")
        async with self._engine.streams.track():
            watch = self._engine.watches.watch(
                self._tenant(),
                request.after_position,
                keyspace,
                for_replica=request.for_replica,
                peer=peer_host(context.peer()),
            )
            async with aclosing(watch) as events:
                async for event in events:
                    yield self._watch_messages.pack(event)

    async def ListChainGroups(
        self,
        request: pb.ListChainGroupsRequest,
        context: Context[pb.ListChainGroupsRequest, pb.ListChainGroupsResponse],
    ) -> AsyncIterator[pb.ListChainGroupsResponse]:
        async with self._engine.streams.track():
            heads = await self._engine.chain_groups(
                self._tenant(), convert.check_id(request.keyspace_id, "keyspace_id")
            )
            for at in range(0, len(heads), _LISTED_BYTES):
                yield pb.ListChainGroupsResponse(group_head_hashes=heads[at : at + _LISTED_BYTES])

    async def DropKeyspaceLocations(
        self,
        request: pb.DropKeyspaceLocationsRequest,
        context: Context[pb.DropKeyspaceLocationsRequest, pb.DropKeyspaceLocationsResponse],
    ) -> pb.DropKeyspaceLocationsResponse:
        count = await self._engine.announcements.drop(
            self._tenant(),
            convert.check_id(request.keyspace_id, "keyspace_id"),
            convert.check_optional_id(request.node_id, "node_id"),
        )
        return pb.DropKeyspaceLocationsResponse(chunk_count=count)

    async def Route(
        self, request: pb.RouteRequest, context: Context[pb.RouteRequest, pb.RouteResponse]
    ) -> pb.RouteResponse:
        query = convert_cluster.chain_query_from_proto(request.match, chunks_max=self._max_chunks)
        answer = await self._engine.routes.route(
            self._tenant(), query, with_unmatched=request.with_unmatched, count=request.count
        )
        return convert_route.route_to_proto(answer)

    async def ReconcileDigests(
        self,
        request: pb.ReconcileDigestsRequest,
        context: Context[pb.ReconcileDigestsRequest, pb.ReconcileDigestsResponse],
    ) -> pb.ReconcileDigestsResponse:
        encodings = request.keyspace_encodings
        convert.check_count(len(encodings), "number of keyspace_encodings", most=self._max_items)
        digests, applied = await self._engine.reconcile_digests(
            self._tenant(),
            convert.check_id(request.node_id, "node_id"),
            request.incarnation,
            request.first_range,
            request.range_count,
            encodings,
        )
        return pb.ReconcileDigestsResponse(digests=digests, applied_sequence=applied)

    async def ReconcileSplitGroups(
        self,
        request: pb.ReconcileSplitGroupsRequest,
        context: Context[pb.ReconcileSplitGroupsRequest, pb.ReconcileSplitGroupsResponse],
    ) -> pb.ReconcileSplitGroupsResponse:
        groups, continuation, applied = await self._engine.reconciliation.split_groups(
            convert.check_id(request.node_id, "node_id"), request.incarnation, request.range, request.continuation
        )
        return pb.ReconcileSplitGroupsResponse(
            groups=map(convert_cluster.split_group_to_proto, groups),
            continuation=continuation,
            applied_sequence=applied,
        )

    async def GetIndexInfo(
        self, request: pb.GetIndexInfoRequest, context: Context[pb.GetIndexInfoRequest, pb.GetIndexInfoResponse]
    ) -> pb.GetIndexInfoResponse:
        return convert_index_info.index_info_to_proto(await self._engine.info())


def _renewal(message: pb.LeaseToRenew) -> Renewal:
    load = convert_cluster.node_load_from_proto(message.load) if message.HasField("load") else None
    node_id = convert.check_id(message.node_id, "node_id")
    return Renewal(node_id=node_id, incarnation=message.incarnation, load=load)


_LISTED_BYTES: Final = 16 * 16_384  # of hashes in one message
_KEPT_BATCHES: Final = 64
_CHUNKS_TAG: Final = bytes([6 << 3 | 2])  # of WatchResponse.chunks


class WatchMessages:
    """Watch events as bytes. A batch that many watchers get is serialized once; only its position is each one's own."""

    def __init__(self) -> None:
        self._batches: dict[int, tuple[ChunkBatch, bytes]] = {}  # by id of the batch, which is kept so that it stays

    def pack(self, event: IndexEvent) -> bytes:
        """The bytes of a WatchResponse. Fields of a message may come one after the other from anywhere."""
        batch = event.event
        if not isinstance(batch, ChunkBatch):
            return index_event_to_proto(event).SerializeToString()
        known = self._batches.get(id(batch))
        if known is None:
            if len(self._batches) >= _KEPT_BATCHES:
                del self._batches[next(iter(self._batches))]
            content = chunk_batch_to_proto(batch).SerializeToString()
            known = self._batches[id(batch)] = (batch, _CHUNKS_TAG + varint(len(content)) + content)
        return pb.WatchResponse(position=event.position).SerializeToString() + known[1]


def add_index_servicer(servicer: pb_grpc.IndexServiceServicer, server: grpc.aio.Server) -> None:
    """Register the servicer as generated code does, with methods in `_AS_BYTES` answering in bytes."""
    catcher = _Catcher()
    pb_grpc.add_IndexServiceServicer_to_server(servicer, cast(grpc.aio.Server, catcher))
    handlers = dict(catcher.handlers)
    for method, rebuild in _AS_BYTES.items():
        handlers[method] = rebuild(handlers[method])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(catcher.service, handlers),))
    server.add_registered_method_handlers(catcher.service, handlers)


class _Catcher:
    """Takes what generated code would register."""

    def __init__(self) -> None:
        self.service = ""
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Not needed: the same handlers come below."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """What is wanted."""
        self.service, self.handlers = service, handlers


def _watch(handler: Any) -> Any:
    return grpc.unary_stream_rpc_method_handler(handler.unary_stream, handler.request_deserializer, bytes)


def _match_stream(handler: Any) -> Any:
    return grpc.stream_stream_rpc_method_handler(handler.stream_stream, handler.request_deserializer, bytes)


_AS_BYTES: Final[dict[str, Callable[[Any], Any]]] = {"Watch": _watch, "MatchStream": _match_stream}
