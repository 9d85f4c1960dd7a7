"""From `register` to `ready`: keyspace, grid, descriptors, mapping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kvpool.core.ipc import HOLD_FILE_BYTES
from kvpool.v1 import common_pb2, gpuagent_pb2
from kvpool.wire.versions import own_version_to_proto
from kvpool_gpuagent.descriptors import DescriptorDesk
from kvpool_gpuagent.engine import GpuAgentEngine, Registration
from kvpool_gpuagent.hold_file import HoldFile
from kvpool_gpuagent.session import EngineSession

OFFER_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Registrar:
    """What registrations need beside the engine: where engines offer the descriptors of their memory."""

    engine: GpuAgentEngine
    desk: DescriptorDesk
    descriptor_socket: Path

    async def map(
        self, session: EngineSession, wanted: Registration, send: Callable[[gpuagent_pb2.EngineResponse], None]
    ) -> None:
        """Take the session's descriptors if it has any, map its memory; sends `registered` and `ready`.

        Raises InvalidRequest naming a handle that does not fit or is not offered in time, Overloaded when the process
        that offers them has half of all sessions.
        """
        if wanted.match_only:
            await session.only_match()
            send(gpuagent_pb2.EngineResponse(registered=self._registered(session, b"")))
            send(gpuagent_pb2.EngineResponse(ready=self._ready()))
            return
        shared = [handle for handle in wanted.handles if handle.ipc is None]
        inbox = self.desk.open([handle.size_bytes for handle in shared] + [HOLD_FILE_BYTES] * wanted.hold_file)
        try:
            send(gpuagent_pb2.EngineResponse(registered=self._registered(session, inbox.token)))
            await inbox.wait(OFFER_TIMEOUT_S)
            self.engine.claim(session, inbox.process)
            descriptors = inbox.take()
            # Nothing is awaited in between: the descriptors always have an owner.
            hold_file = HoldFile(descriptors.pop()) if wanted.hold_file else None
            handles = [replace(handle, descriptor=fd) for handle, fd in zip(shared, descriptors, strict=True)]
            await session.map_cache(handles or wanted.handles, wanted.events, hold_file)
        finally:
            self.desk.drop(inbox)
        send(gpuagent_pb2.EngineResponse(ready=self._ready()))

    def _ready(self) -> gpuagent_pb2.EngineReady:
        return gpuagent_pb2.EngineReady(
            device=self.engine.device.name,
            max_request_chunks=self.engine.config.max_request_chunks,
            link_bytes_per_s=self.engine.link_bytes_per_s,
        )

    def _registered(self, session: EngineSession, token: bytes) -> gpuagent_pb2.EngineRegistered:
        grid = session.rank.grid
        return gpuagent_pb2.EngineRegistered(
            session_id=session.session_id,
            keyspace_id=session.rank.keyspace,
            hash_key=session.hash_key,
            grid=common_pb2.ShardGrid(layer_groups=grid.layer_groups, splits=grid.splits),
            shards=session.rank.shards,
            descriptor_socket=str(self.descriptor_socket),
            descriptor_token=token,
            heartbeat_interval_ms=self.engine.config.heartbeat_interval_ms,
            version=own_version_to_proto(),
        )
