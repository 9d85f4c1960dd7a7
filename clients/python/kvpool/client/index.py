"""Calls to the index: keyspaces, nodes, matches, placement."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from kvpool.client.channel import streamed
from kvpool.client.config import ClientConfig
from kvpool.client.endpoints import Endpoints
from kvpool.client.match_stream import MatchStream
from kvpool.client.retry import TRANSIENT
from kvpool.client.watch import watch_events
from kvpool.core.cluster import (
    UNNUMBERED,
    ChainMatch,
    ChainQuery,
    IndexEvent,
    IndexInfo,
    LiveNode,
    NodeInfo,
    NodeKind,
    NodeLease,
    RegistrationAttempt,
    RouteAnswer,
    StaleLocation,
)
from kvpool.core.errors import ServiceUnavailable
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.location_digest import SplitGroup
from kvpool.core.policy import KeyspacePolicy, VersionedPolicy
from kvpool.v1 import index_pb2
from kvpool.v1.index_pb2_grpc import IndexServiceStub
from kvpool.wire.convert import HASH_BYTES, check_id, check_length
from kvpool.wire.convert_cluster import (
    chain_match_from_proto,
    chain_query_to_proto,
    is_node_known,
    known_nodes_from_proto,
    live_node_from_proto,
    node_info_to_proto,
    split_group_from_proto,
    stale_location_to_proto,
)
from kvpool.wire.convert_grid import grid_from_proto
from kvpool.wire.convert_index_info import index_info_from_proto
from kvpool.wire.convert_keyspace import is_spec_known, spec_from_proto, spec_to_proto
from kvpool.wire.convert_policy import (
    is_policy_known,
    kept_policy_to_proto,
    policy_to_proto,
    versioned_policy_from_proto,
)
from kvpool.wire.convert_route import route_from_proto
from kvpool.wire.versions import check_peer_version, own_version_to_proto

if TYPE_CHECKING:
    from kvpool.v1.index_pb2_grpc import IndexServiceAsyncStub

_HASH_KEY_BYTES = 32


def _policy_of(item: index_pb2.Keyspace) -> VersionedPolicy | None:
    known = item.HasField("policy") and is_policy_known(item.policy.policy)
    return versioned_policy_from_proto(item.policy) if known else None


def _async_stub(channel: grpc.aio.Channel) -> IndexServiceAsyncStub:
    return IndexServiceStub(channel)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedKeyspace:
    """A keyspace that may be used now."""

    keyspace: bytes  # 16 bytes
    hash_key: bytes  # 32 bytes; of the chunk hash
    grid: ShardGrid
    created: bool  # this call bound the name


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedKeyspace:
    """One keyspace of the tenant."""

    name: str
    keyspace: bytes  # 16 bytes
    spec: KeyspaceSpec
    policy: VersionedPolicy | None = None  # None: none was ever set


class IndexClient:
    """Unary calls with deadlines, repeated on the configured replicas while they last. Belongs to one event loop.

    Every method raises what its RPC documents, and ServiceUnavailable, DeadlineExceeded, StoreUnavailable.
    """

    def __init__(self, config: ClientConfig) -> None:
        """raises: InvalidRequest when no index endpoint is configured."""
        self._endpoints: Endpoints[IndexServiceAsyncStub] = Endpoints(config.index_endpoints, config, _async_stub)
        self._match_stream = MatchStream(self._endpoints)

    @property
    def endpoints(self) -> Endpoints[IndexServiceAsyncStub]:
        """For streams that this client does not wrap."""
        return self._endpoints

    async def open_keyspace(self, name: str, spec: KeyspaceSpec, *, timeout_s: float | None = None) -> OpenedKeyspace:
        """Bind a name to a spec. raises: KeyspaceMismatch naming the field, GeometryUnsupported, NotServed."""
        request = index_pb2.OpenKeyspaceRequest(name=name, spec=spec_to_proto(spec), version=own_version_to_proto())
        answer = await self._endpoints.call(lambda stub: stub.OpenKeyspace, request, timeout_s=timeout_s)
        check_peer_version(answer.version, "the index")
        return OpenedKeyspace(
            keyspace=check_id(answer.keyspace_id, "keyspace_id"),
            hash_key=check_length(answer.hash_key, _HASH_KEY_BYTES, "hash_key"),
            grid=grid_from_proto(answer.grid, spec),
            created=answer.created,
        )

    async def list_keyspaces(self) -> list[NamedKeyspace]:
        """The tenant's keyspaces, ordered by name."""
        answer = await self._endpoints.call(lambda stub: stub.ListKeyspaces, index_pb2.ListKeyspacesRequest())
        return [
            NamedKeyspace(
                name=item.name,
                keyspace=item.keyspace_id,
                spec=spec_from_proto(item.spec),
                policy=_policy_of(item),
            )
            for item in answer.keyspaces
            if is_spec_known(item.spec)
        ]

    async def register_node(
        self,
        node: NodeInfo,
        *,
        last_incarnation: int = 0,
        attempt: RegistrationAttempt = UNNUMBERED,
        timeout_s: float | None = None,
    ) -> NodeLease:
        """Grant `node` a lease. raises: StaleIncarnation when a newer process of this node is registered."""
        request = index_pb2.RegisterNodeRequest(
            node=node_info_to_proto(node),
            last_incarnation=last_incarnation,
            process_id=attempt.process_id,
            attempt=attempt.number,
            version=own_version_to_proto(),
        )
        answer = await self._endpoints.call(lambda stub: stub.RegisterNode, request, timeout_s=timeout_s)
        check_peer_version(answer.version, "the index")
        return NodeLease(
            incarnation=answer.incarnation,
            lease_ttl_ms=answer.lease_ttl_ms,
            renew_interval_ms=answer.renew_interval_ms,
            announce_epoch=answer.announce_epoch,
            process_id=attempt.process_id,
        )

    async def set_keyspace_policy(
        self, name: str, policy: KeyspacePolicy, *, timeout_s: float | None = None
    ) -> VersionedPolicy:
        """Replace what every pagestore does with a keyspace. raises: KeyspaceUnknown, InvalidRequest."""
        request = index_pb2.SetKeyspacePolicyRequest(name=name, policy=policy_to_proto(policy))
        answer = await self._endpoints.call(lambda stub: stub.SetKeyspacePolicy, request, timeout_s=timeout_s)
        return VersionedPolicy(keyspace=answer.keyspace_id, policy=policy, version=answer.version)

    async def get_keyspace_policies(
        self, keyspaces: Sequence[bytes], *, timeout_s: float | None = None
    ) -> list[VersionedPolicy]:
        """Policies of those keyspaces that have one."""
        request = index_pb2.GetKeyspacePoliciesRequest(keyspace_ids=keyspaces)
        answer = await self._endpoints.call(lambda stub: stub.GetKeyspacePolicies, request, timeout_s=timeout_s)
        return [versioned_policy_from_proto(one) for one in answer.policies if is_policy_known(one.policy)]

    async def restore_keyspace_policies(
        self,
        node_id: bytes,
        incarnation: int,
        kept: Sequence[tuple[bytes, VersionedPolicy]],
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Put policies back that the store has lost, each with the encoding of its keyspace. raises: LeaseLost."""
        request = index_pb2.RestoreKeyspacePoliciesRequest(
            node_id=node_id, incarnation=incarnation, policies=[kept_policy_to_proto(*one) for one in kept]
        )
        await self._endpoints.call(lambda stub: stub.RestoreKeyspacePolicies, request, timeout_s=timeout_s)

    async def end_lease(
        self, node_id: bytes, incarnation: int, process_id: bytes = b"", *, timeout_s: float | None = None
    ) -> None:
        """End a lease at once. Idempotent. raises: StaleIncarnation for that of another process."""
        request = index_pb2.EndLeaseRequest(node_id=node_id, incarnation=incarnation, process_id=process_id)
        await self._endpoints.call(lambda stub: stub.EndLease, request, timeout_s=timeout_s)

    async def list_nodes(self, kind: NodeKind | None = None) -> list[LiveNode]:
        """Live nodes, ordered by id; None means all kinds."""
        request = index_pb2.ListNodesRequest(kind=index_pb2.NodeKind.ValueType(kind or 0))
        answer = await self._endpoints.call(lambda stub: stub.ListNodes, request)
        return [live_node_from_proto(node) for node in answer.nodes if is_node_known(node.info)]

    async def match(self, query: ChainQuery, *, timeout_s: float | None = None) -> ChainMatch:
        """The longest covered prefix, by a unary call. raises: KeyspaceUnknown, InvalidRequest."""
        request = chain_query_to_proto(query)
        limit_s = self._endpoints.config.match_timeout_s if timeout_s is None else timeout_s
        answer = await self._endpoints.call(lambda stub: stub.Match, request, timeout_s=limit_s)
        return chain_match_from_proto(answer)

    async def route(
        self, query: ChainQuery, *, with_unmatched: bool = False, count: int = 0, timeout_s: float | None = None
    ) -> RouteAnswer:
        """Hosts by what an engine there would find of a chain, best first. raises: KeyspaceUnknown, InvalidRequest.

        with_unmatched: also hosts that hold nothing. count: at most so many; 0: all.
        """
        request = index_pb2.RouteRequest(match=chain_query_to_proto(query), with_unmatched=with_unmatched, count=count)
        limit_s = self._endpoints.config.match_timeout_s if timeout_s is None else timeout_s
        return route_from_proto(await self._endpoints.call(lambda stub: stub.Route, request, timeout_s=limit_s))

    @property
    def match_stream(self) -> MatchStream:
        """The same on one open stream, for hot callers."""
        return self._match_stream

    async def place(
        self, keyspace: bytes, chain_head_hash: bytes, *, host_id: str = "", count: int = 1
    ) -> list[NodeInfo]:
        """Nodes that should hold new chunks of a chain, best first; empty if no pagestore is alive."""
        request = index_pb2.PlaceRequest(
            keyspace_id=keyspace, chain_head_hash=chain_head_hash, host_id=host_id, count=count
        )
        answer = await self._endpoints.call(lambda stub: stub.Place, request)
        return list(known_nodes_from_proto(answer.nodes))

    async def report_stale(self, locations: Sequence[StaleLocation], *, timeout_s: float | None = None) -> list[bool]:
        """Per location, whether it was there and was removed."""
        request = index_pb2.ReportStaleRequest(locations=[stale_location_to_proto(item) for item in locations])
        answer = await self._endpoints.call(lambda stub: stub.ReportStale, request, timeout_s=timeout_s)
        return list(answer.removed)

    def watch(
        self,
        *,
        keyspace: bytes = b"",
        for_replica: bool = False,
        now_s: Callable[[], float] = time.monotonic,
    ) -> AsyncGenerator[IndexEvent]:
        """Events, at least once each, for as long as it is iterated; it reconnects and resumes by itself.

        for_replica: begin with RESYNC, name live nodes in it, send chunk events in batches, and heartbeats, whose age
        counts the time on the way; now_s is the clock for that.
        Close it (`aclose`, or contextlib.aclosing) when done. raises: what cannot be cured by reconnecting.
        """
        return watch_events(self._endpoints, keyspace=keyspace, for_replica=for_replica, now_s=now_s)

    async def list_chain_groups(self, keyspace: bytes, *, timeout_s: float | None = None) -> AsyncGenerator[bytes]:
        """The heads of all chain groups of a keyspace in which any chunk is stored, many 16-byte hashes at a time.

        A group that gets its first chunk meanwhile may be missing. raises: KeyspaceUnknown. It is not repeated.
        """
        endpoint, config = self._endpoints.endpoint, self._endpoints.config
        limit_s = config.call_timeout_s if timeout_s is None else timeout_s
        request = index_pb2.ListChainGroupsRequest(keyspace_id=keyspace)

        def open_call() -> grpc.aio.UnaryStreamCall[
            index_pb2.ListChainGroupsRequest, index_pb2.ListChainGroupsResponse
        ]:
            return self._endpoints.stub().ListChainGroups(request, timeout=limit_s, metadata=config.metadata)

        try:
            with streamed(open_call, config.tls) as call:
                async for message in call:
                    heads = message.group_head_hashes
                    if len(heads) % HASH_BYTES:
                        raise ServiceUnavailable(f"the index sent {len(heads)} bytes of {HASH_BYTES}-byte hashes")
                    yield heads
        except TRANSIENT:
            self._endpoints.fail(endpoint)
            raise

    async def drop_keyspace_locations(
        self, keyspace: bytes, node_id: bytes = b"", *, timeout_s: float | None = None
    ) -> int:
        """Remove one node's locations of a keyspace, or all; the chunks that lost one. raises: KeyspaceUnknown."""
        request = index_pb2.DropKeyspaceLocationsRequest(keyspace_id=keyspace, node_id=node_id)
        answer = await self._endpoints.call(lambda stub: stub.DropKeyspaceLocations, request, timeout_s=timeout_s)
        return answer.chunk_count

    async def reconcile_digests(
        self,
        node_id: bytes,
        incarnation: int,
        *,
        first_range: int,
        range_count: int,
        encodings: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> list[int]:
        """Digests of a node's bucket ranges as the index has them. raises: LeaseLost, StaleIncarnation.

        encodings: of keyspaces, which the index knows again afterwards if it had lost them.
        """
        request = index_pb2.ReconcileDigestsRequest(
            node_id=node_id,
            incarnation=incarnation,
            first_range=first_range,
            range_count=range_count,
            keyspace_encodings=encodings,
        )
        answer = await self._endpoints.call(lambda stub: stub.ReconcileDigests, request, timeout_s=timeout_s)
        if len(answer.digests) != range_count:
            raise ServiceUnavailable(f"the index sent {len(answer.digests)} digests of {range_count}")
        return list(answer.digests)

    async def reconcile_split_groups(
        self, node_id: bytes, incarnation: int, range_number: int, *, timeout_s: float | None = None
    ) -> list[SplitGroup]:
        """The groups of a range that the index has split, with a node's digests. raises: LeaseLost, StaleIncarnation.

        timeout_s: of each call; one is made for about a hundred groups.
        """
        found: dict[tuple[bytes, bytes], SplitGroup] = {}
        request = index_pb2.ReconcileSplitGroupsRequest(node_id=node_id, incarnation=incarnation, range=range_number)
        while True:
            answer = await self._endpoints.call(lambda stub: stub.ReconcileSplitGroups, request, timeout_s=timeout_s)
            for group in map(split_group_from_proto, answer.groups):
                found[group.keyspace, group.group_head] = group
            if not answer.continuation:
                return list(found.values())
            request.continuation = answer.continuation

    async def get_info(self, *, timeout_s: float | None = None) -> IndexInfo:
        """Limits and versions of the replica that answers."""
        answer = await self._endpoints.call(
            lambda stub: stub.GetIndexInfo, index_pb2.GetIndexInfoRequest(), timeout_s=timeout_s
        )
        return index_info_from_proto(answer)

    async def close(self) -> None:
        """Close streams and channels. Idempotent."""
        await self._match_stream.close()
        await self._endpoints.close()
