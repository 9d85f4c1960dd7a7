"""Engine layouts, block ids, CUDA IPC memory and events <-> messages. Malformed input raises InvalidRequest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.core.errors import InvalidRequest
from kvpool.core.ipc import EngineEvent, IpcEvent, IpcMemory
from kvpool.core.layout import EngineLayout, LayerLayout, RowPlane
from kvpool.v1 import gpuagent_pb2
from kvpool.wire.convert import check_count, convert_items

_BLOCK_ID = np.dtype("<i8")

BlockIds = Sequence[int] | npt.NDArray[np.integer[Any]]
Int64s = npt.NDArray[np.int64]


def layout_to_proto(layout: EngineLayout) -> gpuagent_pb2.EngineLayout:
    """The layout as it travels; the sizes of handles travel with the handles."""
    layers = [
        gpuagent_pb2.LayerLayout(
            planes=[_plane_to_proto(plane) for plane in layer.planes],
            scales=[_plane_to_proto(plane) for plane in layer.scales],
        )
        for layer in layout.layers
    ]
    return gpuagent_pb2.EngineLayout(
        block_tokens=layout.block_tokens,
        block_count=layout.block_count,
        layers=layers,
        first_layer=layout.first_layer,
        first_head=layout.first_head,
        head_count=layout.head_count,
    )


def _plane_to_proto(plane: RowPlane) -> gpuagent_pb2.PlaneLayout:
    return gpuagent_pb2.PlaneLayout(
        handle=plane.handle,
        offset_bytes=plane.offset_bytes,
        block_stride_bytes=plane.block_stride_bytes,
        token_stride_bytes=plane.token_stride_bytes,
        head_stride_bytes=plane.head_stride_bytes,
        row_bytes=plane.row_bytes,
    )


def layout_from_proto(message: gpuagent_pb2.EngineLayout, handles: Sequence[gpuagent_pb2.MemoryHandle]) -> EngineLayout:
    """The layout over the handles' memory; whether it fits a keyspace is EngineLayout.validate's to say.

    raises: InvalidRequest for a handle without a size.
    """
    sizes = [
        check_count(handle.size_bytes, f"handles[{index}].size_bytes", least=1) for index, handle in enumerate(handles)
    ]
    return EngineLayout(
        block_tokens=message.block_tokens,
        block_count=message.block_count,
        layers=tuple(convert_items(message.layers, _layer_from_proto, "layer")),
        first_layer=message.first_layer,
        first_head=message.first_head,
        head_count=message.head_count,
        handle_sizes=tuple(sizes),
    )


def _layer_from_proto(message: gpuagent_pb2.LayerLayout) -> LayerLayout:
    return LayerLayout(
        planes=tuple(_plane_from_proto(plane) for plane in message.planes),
        scales=tuple(_plane_from_proto(plane) for plane in message.scales),
    )


def _plane_from_proto(message: gpuagent_pb2.PlaneLayout) -> RowPlane:
    return RowPlane(
        handle=message.handle,
        offset_bytes=message.offset_bytes,
        block_stride_bytes=message.block_stride_bytes,
        token_stride_bytes=message.token_stride_bytes,
        head_stride_bytes=message.head_stride_bytes,
        row_bytes=message.row_bytes,
    )


def block_ids_to_bytes(block_ids: BlockIds) -> bytes:
    """Little-endian int64, concatenated."""
    return np.asarray(block_ids, dtype=_BLOCK_ID).tobytes()


def int64s_from_bytes(packed: bytes, name: str) -> Int64s:
    """Block ids, or what belongs to blocks. raises: InvalidRequest naming the field."""
    if len(packed) % _BLOCK_ID.itemsize:
        raise InvalidRequest(f"{name} must be little-endian int64, got {len(packed)} bytes")
    return np.frombuffer(packed, dtype=_BLOCK_ID).astype(np.int64, copy=False)


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
