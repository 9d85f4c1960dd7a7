"""Unary calls to an agent: its status, and pulls between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from kvpool.client.config import ClientConfig
from kvpool.client.endpoints import Endpoints
from kvpool.core.ipc import EngineEvent
from kvpool.v1 import gpuagent_pb2
from kvpool.v1.gpuagent_pb2_grpc import GpuAgentServiceStub
from kvpool.wire.convert_engine import engine_event_to_proto

if TYPE_CHECKING:
    from kvpool.v1.gpuagent_pb2_grpc import GpuAgentServiceAsyncStub


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """One engine session of an agent."""

    engine_name: str
    keyspace_name: str
    active_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatus:
    """Device, page pool ("arena" or "remote"), sessions, measured bandwidths (0: nothing measured)."""

    node_id: bytes
    device: str
    page_pool: str
    sessions: tuple[AgentSession, ...]
    staging_bytes_per_s: float
    disk_bytes_per_s: float
    remote_bytes_per_s: float


def _async_stub(channel: grpc.aio.Channel) -> GpuAgentServiceAsyncStub:
    return GpuAgentServiceStub(channel)


class AgentControl:
    """Unary calls to one agent. Belongs to one event loop."""

    def __init__(self, endpoint: str, config: ClientConfig) -> None:
        self._endpoints: Endpoints[GpuAgentServiceAsyncStub] = Endpoints((endpoint,), config, _async_stub)

    async def status(self, *, timeout_s: float | None = None) -> AgentStatus:
        """raises: ServiceUnavailable, DeadlineExceeded."""
        answer = await self._endpoints.call(
            lambda stub: stub.GetAgentStatus, gpuagent_pb2.GetAgentStatusRequest(), timeout_s=timeout_s
        )
        return AgentStatus(
            node_id=answer.node_id,
            device=answer.device,
            page_pool=answer.page_pool,
            sessions=tuple(
                AgentSession(
                    engine_name=session.engine_name,
                    keyspace_name=session.keyspace_name,
                    active_requests=session.active_requests,
                )
                for session in answer.sessions
            ),
            staging_bytes_per_s=answer.staging_bytes_per_s,
            disk_bytes_per_s=answer.disk_bytes_per_s,
            remote_bytes_per_s=answer.remote_bytes_per_s,
        )

    async def peer_pull(
        self, request: gpuagent_pb2.PeerPullRequest, *, timeout_s: float
    ) -> gpuagent_pb2.PeerPullResponse:
        """Never repeated; see kvpool.client.peer_pulls. raises: as the proto says; ServiceUnavailable,
        DeadlineExceeded, after which the pull may still run."""
        return await self._endpoints.call(lambda stub: stub.PeerPull, request, timeout_s=timeout_s, idempotent=False)

    async def end_peer_pull(
        self, session_id: bytes, pull_id: int, after: EngineEvent | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Return when the pull touches no slot any more, nor ever will. after: the event that it named.

        raises: SessionUnknown if the session has ended; ServiceUnavailable, DeadlineExceeded.
        """
        request = gpuagent_pb2.EndPeerPullRequest(
            session_id=session_id,
            pull_id=pull_id,
            after=engine_event_to_proto(after) if after is not None else None,
        )
        await self._endpoints.call(lambda stub: stub.EndPeerPull, request, timeout_s=timeout_s)

    async def close(self) -> None:
        """Close the channel. Idempotent."""
        await self._endpoints.close()
