"""Unary calls to an agent: its status, and what its engines' caches hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import numpy as np

from kvpool.client.config import ClientConfig
from kvpool.client.endpoints import Endpoints
from kvpool.core.errors import InvalidRequest
from kvpool.v1 import gpuagent_pb2
from kvpool.v1.gpuagent_pb2_grpc import GpuAgentServiceStub
from kvpool.wire.convert import HASH_BYTES, check_id
from kvpool.wire.convert_engine import Int64s, int64s_from_bytes

if TYPE_CHECKING:
    from kvpool.v1.gpuagent_pb2_grpc import GpuAgentServiceAsyncStub


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """One engine session of an agent."""

    engine_name: str
    keyspace_name: str
    active_requests: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedChunks:
    """What the cache of one engine rank holds of the chunks asked for, N of them, each in B blocks.

    positions: [N] int64, ascending. block_ids, generations: [N, B] int64. scales: its rows have separate scales.
    """

    session_id: bytes
    layers: range
    heads: range
    scales: bool
    positions: Int64s
    block_ids: Int64s
    generations: Int64s


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


def _cached_from_proto(message: gpuagent_pb2.CachedChunks, chunk_count: int) -> CachedChunks:
    """raises: InvalidRequest for what does not fit together."""
    positions = int64s_from_bytes(message.positions, "positions")
    block_ids = int64s_from_bytes(message.block_ids, "block_ids")
    generations = int64s_from_bytes(message.generations, "generations")
    count, width = positions.size, block_ids.size // max(1, positions.size)
    # Bounds first: differences of any int64 may wrap around.
    inside = bool(((positions >= 0) & (positions < chunk_count)).all())
    ascending = inside and bool((np.diff(positions) > 0).all())
    if not ascending or not block_ids.size == generations.size == count * width:
        raise InvalidRequest("positions, blocks and generations of cached chunks do not fit each other")
    return CachedChunks(
        session_id=check_id(message.session_id, "session_id"),
        layers=range(message.first_layer, message.first_layer + message.layer_count),
        heads=range(message.first_head, message.first_head + message.head_count),
        scales=message.scales,
        positions=positions,
        block_ids=block_ids.reshape(count, width),
        generations=generations.reshape(count, width),
    )


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

    async def find_cached_chunks(
        self, keyspace: bytes, chunk_hashes: bytes, engine_id: bytes, *, timeout_s: float
    ) -> list[CachedChunks]:
        """Return which chunks caches of the agent's sessions hold. raises: InvalidRequest, TenantDenied,
        ServiceUnavailable, DeadlineExceeded."""
        request = gpuagent_pb2.FindCachedChunksRequest(
            keyspace_id=keyspace, chunk_hashes=chunk_hashes, engine_id=engine_id
        )
        answer = await self._endpoints.call(
            lambda stub: stub.FindCachedChunks, request, timeout_s=timeout_s, idempotent=False
        )
        return [_cached_from_proto(each, len(chunk_hashes) // HASH_BYTES) for each in answer.caches]

    async def close(self) -> None:
        """Close the channel. Idempotent."""
        await self._endpoints.close()
