"""Where an engine registers that launches kernels for the measured agent.

A session's own messages on a real gRPC stream, so that a launch costs here what it costs an agent; but nothing is asked
in such a session, and its cache is mapped by a command.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from kvpool.core.errors import InvalidRequest, KvPoolError
from kvpool.core.grid import ShardGrid
from kvpool.core.launches import Launch
from kvpool.v1 import common_pb2, gpuagent_pb2
from kvpool.wire.convert_launch import launch_to_proto, launched_from_proto
from kvpool_gpuagent.engine import Registration
from kvpool_gpuagent.launches import SessionLaunches
from kvpool_gpuagent.measure.cache_plan import CachePlan
from kvpool_gpuagent.messages import registration_from_proto
from kvpool_gpuagent.outbox import Outbox

LAUNCH_TIMEOUT_S = 10.0  # an agent waits less; here a slow launch is to be seen as a slow one
_HEARTBEAT_MS = 2000
_FLUSH_S = 2.0
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
)

Request = gpuagent_pb2.EngineRequest
Response = gpuagent_pb2.EngineResponse


@dataclass(slots=True, eq=False)
class LaunchingEngine:
    """An engine that is registered. failure: why a launch of its failed."""

    wanted: Registration
    launches: SessionLaunches
    failure: str = ""


class LaunchDesk:
    """One engine at a time: the newest. Belongs to one event loop."""

    def __init__(self) -> None:
        self._server: grpc.aio.Server | None = None
        self._engine: LaunchingEngine | None = None

    async def listen(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        """Serve at a path, unless that is done already. Raises RuntimeError if it cannot be bound."""
        if self._server is None:
            server = grpc.aio.server(options=_OPTIONS)
            server.add_generic_rpc_handlers((self._handlers(),))
            server.add_insecure_port(f"unix:{command['socket']}")
            await server.start()
            self._server = server
        return {}

    def launches_for(self, plan: CachePlan) -> SessionLaunches:
        """Of the engine that is registered with this cache. Raises ValueError if none is."""
        if self._engine is None:
            raise ValueError("no engine lends scratch; have it register first")
        wanted = self._engine.wanted
        if (wanted.spec, wanted.layout) != (plan.spec, plan.layout):
            raise ValueError("the engine lends scratch for another cache")
        return self._engine.launches

    def failure(self) -> str:
        """Why the engine launches no more."""
        if self._engine is None:
            return "it has left"
        return self._engine.failure or f"no answer within {LAUNCH_TIMEOUT_S:g} s"

    async def close(self) -> None:
        """End the sessions. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    def _handlers(self) -> grpc.GenericRpcHandler:
        """One method of the agent's service."""
        session = grpc.stream_stream_rpc_method_handler(
            self._serve, request_deserializer=Request.FromString, response_serializer=Response.SerializeToString
        )
        service = gpuagent_pb2.DESCRIPTOR.services_by_name["GpuAgentService"]
        return grpc.method_handlers_generic_handler(service.full_name, {"EngineSession": session})

    async def _serve(self, requests: AsyncIterator[Request], context: Any) -> None:
        outbox: Outbox[Response] = Outbox(context.write, lambda: None)
        engine: LaunchingEngine | None = None
        try:
            async for request in requests:
                if engine is None:
                    engine = self._engine = self._register(request, outbox)
                elif request.WhichOneof("kind") == "close":
                    engine.launches.end()
                    outbox.put(Response(request_id=request.request_id, closed=gpuagent_pb2.EngineClose()))
                    break
                else:
                    _take(request, engine, outbox)
        except KvPoolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        finally:
            if engine is not None:
                engine.launches.end()
                self._engine = None if self._engine is engine else self._engine
            await outbox.close(_FLUSH_S)

    def _register(self, request: Request, outbox: Outbox[Response]) -> LaunchingEngine:
        """Raises InvalidRequest for an engine that lends nothing or does not describe itself, GeometryUnsupported."""
        wanted = registration_from_proto(request.register)
        if wanted.scratch is None:
            raise InvalidRequest("an engine registers here to lend scratch")

        def send(launch: Launch) -> None:
            outbox.put(Response(launch=launch_to_proto(launch)))

        engine = LaunchingEngine(wanted, SessionLaunches(wanted.scratch, send, LAUNCH_TIMEOUT_S))
        grid = ShardGrid.of(wanted.spec)
        registered = gpuagent_pb2.EngineRegistered(
            session_id=os.urandom(16),
            keyspace_id=bytes(16),
            hash_key=bytes(32),
            grid=common_pb2.ShardGrid(layer_groups=grid.layer_groups, head_groups=grid.head_groups),
            shards=grid.bitmap_for(wanted.layout.layer_range, wanted.layout.head_range),
            heartbeat_interval_ms=_HEARTBEAT_MS,
        )
        outbox.put(Response(request_id=request.request_id, registered=registered))
        outbox.put(Response(request_id=request.request_id, ready=gpuagent_pb2.EngineReady(device="cuda")))
        return engine


def _take(request: Request, engine: LaunchingEngine, outbox: Outbox[Response]) -> None:
    match request.WhichOneof("kind"):
        case "launched":
            launched = launched_from_proto(request.launched)
            if launched.error is not None:
                engine.failure = launched.error.message
            engine.launches.ended(launched)
        case "heartbeat":
            outbox.put(Response(heartbeat=gpuagent_pb2.EngineHeartbeat()))
