"""GpuAgentService: translates, nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kvpool.core.errors import NotServed
from kvpool.v1 import gpuagent_pb2, gpuagent_pb2_grpc
from kvpool_gpuagent.core.bandwidth import LoadSource
from kvpool_gpuagent.descriptors import DescriptorDesk
from kvpool_gpuagent.engine import GpuAgentEngine
from kvpool_gpuagent.stream import EngineStream


class GpuAgentServicer(gpuagent_pb2_grpc.GpuAgentServiceServicer):
    """See proto/kvpool/v1/gpuagent.proto."""

    def __init__(
        self, engine: GpuAgentEngine, node_id: bytes, page_pool: str, desk: DescriptorDesk, descriptor_socket: Path
    ) -> None:
        self._engine, self._node_id, self._page_pool = engine, node_id, page_pool
        self._desk, self._descriptor_socket = desk, descriptor_socket

    async def EngineSession(
        self, request_iterator: AsyncIterator[gpuagent_pb2.EngineRequest], context: Any
    ) -> AsyncIterator[gpuagent_pb2.EngineResponse]:
        stream = EngineStream(self._engine, self._desk, self._descriptor_socket)
        async for response in stream.serve(request_iterator):
            yield response

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
        raise NotServed("PeerPull comes with the CUDA device; load from staging instead")
