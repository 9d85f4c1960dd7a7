"""GpuAgentService: translates, nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from kvpool.v1 import gpuagent_pb2, gpuagent_pb2_grpc
from kvpool.wire.convert import check_id
from kvpool.wire.convert_ipc import engine_event_from_proto
from kvpool_gpuagent.core.bandwidth import LoadSource
from kvpool_gpuagent.registering import Registrar
from kvpool_gpuagent.servicer_peers import CacheLender, outcome_to_proto, wanted_from_proto
from kvpool_gpuagent.stream import EngineHandler, session_rules
from kvpool_server.session_stream import SessionStream, peer_address


class GpuAgentServicer(gpuagent_pb2_grpc.GpuAgentServiceServicer):
    """See proto/kvpool/v1/gpuagent.proto."""

    def __init__(
        self, registrar: Registrar, node_id: bytes, page_pool: str, tenant: Callable[[], str] | None = None
    ) -> None:
        """page_pool: "arena" or "remote". tenant: of the caller; None: everybody is the configured one."""
        self._registrar, self._engine = registrar, registrar.engine
        self._lender = CacheLender(self._engine, tenant or (lambda: self._engine.config.tenant))
        self._node_id, self._page_pool = node_id, page_pool

    async def EngineSession(  # type: ignore[override]  # a coroutine that writes: its end is known when it is over
        self, request_iterator: AsyncIterator[gpuagent_pb2.EngineRequest], context: Any
    ) -> None:
        stream = SessionStream(
            session_rules(self._engine.config), EngineHandler(self._registrar, peer_address(context.peer()))
        )
        await stream.serve(request_iterator, context.write)

    async def GetAgentStatus(
        self, request: gpuagent_pb2.GetAgentStatusRequest, context: Any
    ) -> gpuagent_pb2.GetAgentStatusResponse:
        bandwidths = self._engine.bandwidths
        return gpuagent_pb2.GetAgentStatusResponse(
            node_id=self._node_id,
            device=self._engine.device.name,
            page_pool=self._page_pool,
            sessions=[
                gpuagent_pb2.EngineSessionStatus(
                    engine_name=session.engine_name,
                    keyspace_name=session.keyspace_name,
                    active_requests=session.active_requests,
                )
                for session in self._engine.sessions
            ],
            staging_bytes_per_s=bandwidths.bytes_per_s(LoadSource.STAGING),
            disk_bytes_per_s=bandwidths.bytes_per_s(LoadSource.DISK),
            remote_bytes_per_s=bandwidths.bytes_per_s(LoadSource.REMOTE),
        )

    async def PeerPull(self, request: gpuagent_pb2.PeerPullRequest, context: Any) -> gpuagent_pb2.PeerPullResponse:
        session_id = check_id(request.session_id, "session_id")
        return outcome_to_proto(await self._engine.pulls.pull(session_id, wanted_from_proto(request)))

    async def EndPeerPull(
        self, request: gpuagent_pb2.EndPeerPullRequest, context: Any
    ) -> gpuagent_pb2.EndPeerPullResponse:
        after = engine_event_from_proto(request.after) if request.HasField("after") else None
        await self._engine.pulls.end(check_id(request.session_id, "session_id"), request.pull_id, after)
        return gpuagent_pb2.EndPeerPullResponse()

    async def LendCache(  # type: ignore[override]  # as EngineSession
        self, request_iterator: AsyncIterator[gpuagent_pb2.LendCacheRequest], context: Any
    ) -> None:
        await self._lender.serve(request_iterator, context.write)
