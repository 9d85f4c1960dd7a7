"""All kernels of one rank's cache, behind its plane table: what to launch for a burst of pages, and with which shapes.

The agent launches them in its own process, an engine that lends its GPU time in the engine's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvpool.core.elements import Dtype
from kvpool.core.plane_table import PlaneTable
from kvpool_gpuagent.kernels.burst_tables import BurstPages, BurstTables
from kvpool_gpuagent.kernels.codec_shapes import CodecShape, RowCodec
from kvpool_gpuagent.kernels.dequantize import dequantize_launch
from kvpool_gpuagent.kernels.gather import gather_launch
from kvpool_gpuagent.kernels.quantize import quantize_launch
from kvpool_gpuagent.kernels.scatter import scatter_launch
from kvpool_gpuagent.kernels.tables import CopyShape, copy_shape

_TORCH_TYPES = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16, Dtype.FP32: torch.float32}


class CacheKernels:
    """Launches on the current stream. Tables must stay as they are until the launches have run."""

    most_pages = 1024  # of a burst

    def __init__(self, table: PlaneTable, to_device: Callable[[npt.NDArray[np.int64]], Tensor]) -> None:
        self._table = table
        self._planes = to_device(table.planes)
        is_scale = np.zeros(len(table.planes), dtype=np.bool_)
        for shard in table.shards.values():
            is_scale[shard.scale_rows] = True
        if table.layout.holds_codec_rows(table.spec):
            copied = [(_copy_shape(table, ~is_scale, table.row_bytes), False)]
            if is_scale.any():
                copied.append((_copy_shape(table, is_scale, table.scale_row_bytes), True))
            self._gathers = [gather_launch(shape, scales) for shape, scales in copied]
            self._scatters = [scatter_launch(shape, scales) for shape, scales in copied]
        else:
            codec = _codec_shape(table)
            self._gathers = [quantize_launch(codec)]
            self._scatters = [dequantize_launch(codec)]

    def gather(self, tables: BurstTables) -> None:
        """Fill the payloads of a burst from the cache."""
        for launch in self._gathers:
            launch.start(tables.count, *tables.addresses, self._planes.data_ptr())

    def scatter(self, tables: BurstTables) -> None:
        """Move payloads into the cache."""
        for launch in self._scatters:
            launch.start(tables.count, *tables.addresses, self._planes.data_ptr())

    def warm_up(self, tables: BurstTables) -> None:
        """Have all kernels compiled and loaded: launches that leave their only page out. Compiling takes seconds."""
        tables.fill(self._table, BurstPages.absent(self._table, 1))
        self.gather(tables)
        self.scatter(tables)


def _copy_shape(table: PlaneTable, chosen: npt.NDArray[np.bool_], row_bytes: int) -> CopyShape:
    """Of the planes that only have their bytes copied."""
    return copy_shape(
        table.planes[chosen].tolist(),
        positions=table.spec.positions,
        block_rows=table.block_rows,
        most_heads=_most_heads(table),
        row_bytes=row_bytes,
        most_planes=_most_planes(table),
        row_planes=table.spec.planes,
        unit_rows=table.unit_rows,
    )


def _codec_shape(table: PlaneTable) -> CodecShape:
    """Of planes whose rows a codec makes other bytes of."""
    rows = CopyShape(
        table.spec.positions,
        table.block_rows,
        _most_heads(table),
        table.cache_row_bytes,
        table.unit_bytes,
        _most_planes(table),
        table.spec.planes,
        table.unit_rows,
    )
    return CodecShape(rows, RowCodec(table.spec.codec.value), _TORCH_TYPES[table.spec.dtype])


def _most_heads(table: PlaneTable) -> int:
    return max(len(shard.heads) for shard in table.shards.values())


def _most_planes(table: PlaneTable) -> int:
    return max(shard.plane_count for shard in table.shards.values())
