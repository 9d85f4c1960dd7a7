"""Engine layouts, block ids and memory handles <-> messages. Malformed input raises InvalidRequest naming the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.core.layout import EngineLayout, LayerLayout, RowPlane
from kvpool.v1 import gpuagent_pb2
from kvpool.wire.convert import check_count, convert_items

_BLOCK_ID = np.dtype("<i8")

BlockIds = Sequence[int] | npt.NDArray[np.integer[Any]]


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
