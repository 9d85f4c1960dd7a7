"""Everything of a pagestore that listens: control calls, page streams, descriptors."""

from __future__ import annotations

import asyncio

from kvpool.core.cluster import NodeInfo, NodeKind
from kvpool.core.tracing import NO_TRACER, Tracer
from kvpool.v1 import pagestore_pb2, pagestore_pb2_grpc
from kvpool_pagestore.bulk.gateway import EngineBulkGateway
from kvpool_pagestore.bulk.servicer import BulkLimits, PageTransferServicer
from kvpool_pagestore.config import PageStoreConfig
from kvpool_pagestore.engine.store import PageStoreEngine
from kvpool_pagestore.servicer.control import PageStoreServicer
from kvpool_pagestore.servicer.session import SessionLimits
from kvpool_server.data_directory import boot_id
from kvpool_server.fds import FdGrant, FdServer, PeerCredentials
from kvpool_server.interceptors import (
    DeadlinePolicy,
    DefaultTenantAuthenticator,
    RequestMetrics,
    aio_interceptors,
    current_identity,
    sync_interceptors,
)
from kvpool_server.listen import TcpAddress, parse_address
from kvpool_server.server import BulkServer, ControlServer
from kvpool_server.tls import ServiceTls

_SERVICES = pagestore_pb2.DESCRIPTOR.services_by_name
_FLUSH = f"/{_SERVICES['PageStoreService'].full_name}/Flush"
_GRACE_S = 1.0  # for running calls, once sessions have ended


class PageStoreServers:
    """Everything that listens."""

    def __init__(
        self,
        config: PageStoreConfig,
        engine: PageStoreEngine,
        node_id: bytes,
        requests: RequestMetrics,
        tls: ServiceTls | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._config = config
        self._tls = tls
        self._engine = engine
        self._node_id = node_id
        self._socket = (config.socket or config.data_dir / "pagestore.sock").absolute()
        descriptor_socket = (config.descriptor_socket or self._socket.with_name(f"{self._socket.name}.fds")).absolute()
        authenticator = DefaultTenantAuthenticator(config.tenant)
        # A flush takes as long as the disk takes; its client says how long it will wait.
        deadlines = DeadlinePolicy(caps_s={_FLUSH: 600.0})
        self.control = ControlServer(
            interceptors=aio_interceptors(
                metrics=requests, authenticator=authenticator, deadlines=deadlines, tracer=tracer
            ),
            service_names=[service.full_name for service in _SERVICES.values()],
        )
        limits = SessionLimits(
            node_id=node_id,
            descriptor_socket=descriptor_socket,
            heartbeat_interval_ms=config.heartbeat_interval_ms,
            max_leases=config.max_leases,
            max_requests_in_flight=config.max_requests_in_flight,
            arena_bytes=config.arena_bytes,
        )
        servicer = PageStoreServicer(engine, _tenant, limits, tracer)
        pagestore_pb2_grpc.add_PageStoreServiceServicer_to_server(servicer, self.control.grpc)
        self.bulk = BulkServer(
            threads=config.bulk_threads,
            interceptors=sync_interceptors(
                metrics=requests, authenticator=authenticator, deadlines=deadlines, tracer=tracer
            ),
        )
        gateway = EngineBulkGateway(engine, asyncio.get_running_loop())
        bulk_limits = BulkLimits(streams_per_peer=config.peer_bulk_streams)
        PageTransferServicer(gateway, _tenant, bulk_limits).add_to(self.bulk.grpc)
        self._descriptors = FdServer(descriptor_socket, on_fetch=self._fetch, group_access=config.socket_group_access)

    def listen(self, metrics_url: str) -> NodeInfo:
        """Bind everything: the node as others reach it. Raises StartupFailed."""
        config = self._config
        control_port = self.control.listen_tcp(parse_address("listen", config.listen), self._tls)
        bulk_port = self.bulk.listen_tcp(parse_address("bulk_listen", config.bulk_listen), self._tls)
        if config.health_listen:
            self.control.listen_health(parse_address("health_listen", config.health_listen))
        self.control.listen_unix(self._socket, group_access=config.socket_group_access)
        return NodeInfo(
            node_id=self._node_id,
            kind=NodeKind.PAGESTORE,
            host_id=config.host_id or boot_id(),
            endpoint=str(TcpAddress(config.advertise_host, control_port)),
            bulk_endpoint=str(TcpAddress(config.advertise_host, bulk_port)),
            local_socket=str(self._socket),
            capacity_bytes=config.disk_bytes or config.arena_bytes,
            metrics_url=metrics_url,
        )

    async def start(self) -> None:
        self._descriptors.start()
        self.bulk.start()
        await self.control.start()
        await self.control.set_serving(True)

    async def stop(self) -> None:
        self._descriptors.close()
        await self.control.stop(_GRACE_S)
        await asyncio.to_thread(self.bulk.stop, _GRACE_S)

    def _fetch(self, peer: PeerCredentials, token: bytes, number: int) -> FdGrant:
        # In another PID namespace (a container's) the kernel shows no pid.
        process = f"process {peer.pid}" if peer.pid else f"user {peer.uid}"
        found = self._engine.sessions.descriptor(token, number, process)
        return FdGrant(found.fd, found.size_bytes, close_after=found.give_up)


def _tenant() -> str:
    return current_identity().tenant
