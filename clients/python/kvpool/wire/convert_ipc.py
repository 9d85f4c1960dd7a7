"""CUDA IPC memory and events <-> messages. Malformed input raises InvalidRequest naming the field."""

from __future__ import annotations

from kvpool.core.ipc import EngineEvent, IpcEvent, IpcMemory
from kvpool.v1 import gpuagent_pb2


def ipc_memory_to_proto(memory: IpcMemory) -> gpuagent_pb2.CudaIpcHandle:
    """As it travels; the size travels beside it."""
    return gpuagent_pb2.CudaIpcHandle(
        device_uuid=memory.device_uuid,
        handle=memory.handle,
        allocation_offset=memory.allocation_offset,
        allocation_bytes=memory.allocation_bytes,
    )


def ipc_memory_from_proto(message: gpuagent_pb2.CudaIpcHandle, name: str, size_bytes: int) -> IpcMemory:
    """Memory of which size_bytes are meant. raises: InvalidRequest unless they are inside of its allocation."""
    memory = IpcMemory(message.device_uuid, message.handle, message.allocation_offset, message.allocation_bytes)
    memory.check(name, size_bytes)
    return memory


def ipc_event_to_proto(event: IpcEvent) -> gpuagent_pb2.CudaIpcEventHandle:
    """As it travels."""
    return gpuagent_pb2.CudaIpcEventHandle(device_uuid=event.device_uuid, handle=event.handle)


def ipc_event_from_proto(message: gpuagent_pb2.CudaIpcEventHandle, name: str) -> IpcEvent:
    """raises: InvalidRequest."""
    event = IpcEvent(message.device_uuid, message.handle)
    event.check(name)
    return event


def engine_event_to_proto(event: EngineEvent) -> gpuagent_pb2.EngineEvent:
    """One recording."""
    return gpuagent_pb2.EngineEvent(slot=event.slot, generation=event.generation)


def engine_event_from_proto(message: gpuagent_pb2.EngineEvent) -> EngineEvent:
    """One recording; whether it may be is the session's to say."""
    return EngineEvent(slot=message.slot, generation=message.generation)
