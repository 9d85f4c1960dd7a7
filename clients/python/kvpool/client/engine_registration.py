"""How an engine rank registers with its agent."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvpool.client.fds import descriptor_path
from kvpool.client.shared_memory import SharedMemoryHold, SharedMemoryRegion
from kvpool.core.errors import InvalidRequest, KvPoolError
from kvpool.core.ipc import IpcMemory
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool.v1 import gpuagent_pb2
from kvpool.wire.convert import item_error_from_proto
from kvpool.wire.convert_engine import ipc_event_to_proto, ipc_memory_to_proto, layout_to_proto
from kvpool.wire.convert_keyspace import spec_to_proto
from kvpool.wire.versions import own_version_to_proto

if TYPE_CHECKING:
    from kvpool.client.block_generations import BlockGenerations
    from kvpool.client.engine_events import EventSlots
    from kvpool.client.engine_hold import GpuMemoryHold


class OfferFd(Protocol):
    """kvpool.client.fds.offer_fd, or a stand-in."""

    def __call__(self, path: str, token: bytes, number: int, size_bytes: int, fd: int, *, timeout_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class GpuRegion:
    """GPU memory of the engine: size_bytes from the first byte of `memory` on."""

    size_bytes: int
    memory: IpcMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRegistration:
    """How an engine rank registers. regions: the memory of layout.handle_sizes, in order, all of one kind."""

    endpoint: str  # of the agent, usually "unix:/path"
    engine_name: str
    keyspace_name: str
    spec: KeyspaceSpec
    layout: EngineLayout
    regions: tuple[SharedMemoryRegion, ...] | tuple[GpuRegion, ...]
    events: EventSlots | None = None  # of GPU work that stores and loads may have to come after
    load_only: bool = False
    match_only: bool = False  # an engine's scheduler: there are no regions, and nothing can be stored or loaded
    generations: BlockGenerations | None = None  # of an engine that announces what its GPU memory holds
    engine_id: bytes = b""  # equal for all sessions of an engine; matches without one name no GPU caches of others
    previous_session_id: bytes = b""

    def check(self) -> None:
        """raises: InvalidRequest naming what does not fit."""
        if self.match_only:
            if self.regions or self.events is not None:
                raise InvalidRequest("match_only: leave regions and events out")
            return
        sizes = tuple(region.size_bytes for region in self.regions)
        if sizes != self.layout.handle_sizes:
            raise InvalidRequest(f"regions have {sizes} bytes, the layout's handles {self.layout.handle_sizes}")
        if self.generations is not None and not all(isinstance(region, GpuRegion) for region in self.regions):
            raise InvalidRequest("generations: only GPU memory can be copied from; leave them out")
        for number, region in enumerate(self.regions):
            if isinstance(region, GpuRegion):
                region.memory.check(f"regions[{number}]", region.size_bytes)
            if isinstance(region, GpuRegion) != isinstance(self.regions[0], GpuRegion):
                raise InvalidRequest("regions must be all shared memory or all GPU memory")

    def new_hold(self) -> SharedMemoryHold | GpuMemoryHold:
        """To know when the agent of one session has let go of the memory."""
        shared = [region for region in self.regions if isinstance(region, SharedMemoryRegion)]
        if shared or self.match_only:
            return SharedMemoryHold(shared)
        from kvpool.client.engine_hold import GpuMemoryHold  # engines on CPUs need none of it

        return GpuMemoryHold(beside=() if self.generations is None else (self.generations.region,))


class RegistrationReply:
    """The two answers of `register` to an agent at `endpoint`. Implements stream.Reply."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        loop = asyncio.get_running_loop()
        self.registered: asyncio.Future[gpuagent_pb2.EngineRegistered] = loop.create_future()
        self.ready: asyncio.Future[gpuagent_pb2.EngineReady] = loop.create_future()
        for future in (self.registered, self.ready):
            future.add_done_callback(lambda done: done.cancelled() or done.exception())

    def deliver(self, response: gpuagent_pb2.EngineResponse) -> bool:
        if response.HasField("error"):
            self.fail(item_error_from_proto(response.error))
        elif response.HasField("registered") and not self.registered.done():
            announced = response.registered.descriptor_socket
            response.registered.descriptor_socket = descriptor_path(self._endpoint, announced)
            self.registered.set_result(response.registered)
        elif response.HasField("ready") and not self.ready.done():
            self.ready.set_result(response.ready)
        return self.ready.done()

    def fail(self, error: KvPoolError) -> None:
        for future in (self.registered, self.ready):
            if not future.done():
                future.set_exception(error)


def register_to_proto(plan: EngineRegistration) -> gpuagent_pb2.EngineRegister:
    """The first message of a session."""
    return gpuagent_pb2.EngineRegister(
        engine_name=plan.engine_name[:128],
        keyspace_name=plan.keyspace_name,
        spec=spec_to_proto(plan.spec),
        handles=_handles_to_proto(plan),
        layout=layout_to_proto(plan.layout),
        load_only=plan.load_only,
        previous_session_id=plan.previous_session_id,
        events=[ipc_event_to_proto(event) for event in plan.events.handles] if plan.events is not None else [],
        match_only=plan.match_only,
        hold_file=any(isinstance(region, GpuRegion) for region in plan.regions),
        version=own_version_to_proto(),
        block_generations=plan.generations is not None,
        reads_batched=True,
        engine_id=plan.engine_id,
    )


def lend(
    offer: OfferFd,
    registered: gpuagent_pb2.EngineRegistered,
    number: int,
    region: SharedMemoryRegion,
    timeout_s: float,
) -> None:
    """Offer the descriptor of a region under its number; blocks. raises: as kvpool.client.fds.offer_fd."""
    fd = region.lent_descriptor()
    try:
        offer(
            registered.descriptor_socket,
            registered.descriptor_token,
            number,
            region.size_bytes,
            fd,
            timeout_s=timeout_s,
        )
    finally:
        os.close(fd)


def _handles_to_proto(plan: EngineRegistration) -> list[gpuagent_pb2.MemoryHandle]:
    if not plan.match_only:
        return [_handle_to_proto(region) for region in plan.regions]
    nothing = gpuagent_pb2.SharedMemoryHandle()
    return [gpuagent_pb2.MemoryHandle(size_bytes=size, shared_memory=nothing) for size in plan.layout.handle_sizes]


def _handle_to_proto(region: SharedMemoryRegion | GpuRegion) -> gpuagent_pb2.MemoryHandle:
    if isinstance(region, GpuRegion):
        memory = ipc_memory_to_proto(region.memory)
        return gpuagent_pb2.MemoryHandle(size_bytes=region.size_bytes, cuda_ipc=memory)
    return gpuagent_pb2.MemoryHandle(size_bytes=region.size_bytes, shared_memory=gpuagent_pb2.SharedMemoryHandle())
