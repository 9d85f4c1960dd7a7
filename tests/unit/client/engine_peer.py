"""A scripted agent, and an engine that registers with it."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvpool.client.config import ClientConfig
from kvpool.client.engine_registration import EngineRegistration
from kvpool.client.gpuagent import EngineSession
from kvpool.client.shared_memory import SharedMemoryRegion
from kvpool.core.grid import ShardGrid
from kvpool.v1 import common_pb2, gpuagent_pb2, gpuagent_pb2_grpc
from tests.fixtures.layout_presets import contiguous_layout
from tests.unit.client.servers import SPEC, Script, Streams, serve, test_config

HASH_KEY = b"h" * 32
BLOCK_TOKENS = 8
Response = gpuagent_pb2.EngineResponse


class ScriptedAgent(gpuagent_pb2_grpc.GpuAgentServiceServicer):
    def __init__(self) -> None:
        self.streams = Streams()

    async def EngineSession(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for message in self.streams.run(request_iterator, context):
            yield message


class AgentMemory:
    """What the agent maps of the engine."""

    def __init__(self) -> None:
        self.mappings: list[mmap.mmap] = []

    def offer(self, path: str, token: bytes, number: int, size_bytes: int, fd: int, *, timeout_s: float) -> None:
        """Stands in for kvpool.client.fds.offer_fd: the agent gets a duplicate, maps it and closes it."""
        assert (path, token) == ("/descriptors", b"t" * 32)
        received = os.dup(fd)
        self.mappings.append(mmap.mmap(received, size_bytes))
        os.close(received)

    def let_go(self) -> None:
        for mapping in self.mappings:
            mapping.close()
        self.mappings.clear()


class Engine:
    """The engine's side and the scripted other one."""

    def __init__(self, agent: ScriptedAgent, endpoint: str, config: ClientConfig) -> None:
        self.agent = agent
        self.memory = AgentMemory()
        self.config = config
        layout = contiguous_layout(SPEC, range(2), range(2), BLOCK_TOKENS, 16)
        self.region = SharedMemoryRegion(layout.handle_sizes[0])
        self.plan = EngineRegistration(
            endpoint=endpoint,
            engine_name="test",
            keyspace_name="tiny",
            spec=SPEC,
            layout=layout,
            regions=(self.region,),
        )

    async def greet(self, *, max_request_chunks: int = 100, interval_ms: int = 10_000) -> tuple[Script, Any]:
        """Answer the `register` of the next stream."""
        stream = await self.agent.streams.next()
        request = await stream.next("register")
        grid = ShardGrid.of(SPEC)
        registered = gpuagent_pb2.EngineRegistered(
            session_id=b"s" * 16,
            keyspace_id=b"k" * 16,
            hash_key=HASH_KEY,
            grid=common_pb2.ShardGrid(layer_groups=grid.layer_groups, splits=grid.splits),
            shards=grid.all_shards,
            descriptor_socket="/descriptors",
            descriptor_token=b"t" * 32,
            heartbeat_interval_ms=interval_ms,
        )
        stream.send(Response(request_id=request.request_id, registered=registered))
        ready = gpuagent_pb2.EngineReady(device="cpu", max_request_chunks=max_request_chunks, reads_batched=True)
        stream.send(Response(request_id=request.request_id, ready=ready))
        return stream, request

    async def open(self, **greeting: int) -> tuple[EngineSession, Script]:
        opening = asyncio.create_task(EngineSession.open(self.plan, self.config, offer=self.memory.offer))
        stream, _ = await self.greet(**greeting)
        return await opening, stream


@asynccontextmanager
async def engine(**settings: Any) -> AsyncGenerator[Engine]:
    agent = ScriptedAgent()  # type: ignore[abstract]
    async with serve(gpuagent_pb2_grpc.add_GpuAgentServiceServicer_to_server, agent) as (_, endpoint):
        one = Engine(agent, endpoint, test_config(**settings))
        try:
            yield one
        finally:
            one.memory.let_go()
            one.region.close()
