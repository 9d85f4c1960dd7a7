"""All kernels of one rank's cache, and the tables of one burst of pages: taken for a burst, given back after it.

The agent launches them in its own process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvpool.core.elements import Dtype
from kvpool.core.plane_table import PlaneTable
from kvpool_gpuagent.kernels.codec_shapes import CodecShape, RowCodec
from kvpool_gpuagent.kernels.dequantize import dequantize_launch
from kvpool_gpuagent.kernels.gather import gather_launch
from kvpool_gpuagent.kernels.quantize import quantize_launch
from kvpool_gpuagent.kernels.scatter import scatter_launch
from kvpool_gpuagent.kernels.tables import PAGE_COLUMNS, CopyShape, PageColumn, copy_shape

Int64s = npt.NDArray[np.int64]

HostTable = Callable[[int], Tensor]
"""Makes [count] int64 of host memory that kernels can read and write."""


@dataclass(frozen=True, slots=True, eq=False)
class BurstPages:
    """What a burst moves.

    shards, skip_tokens: [N], shards of the plane table; block_ids: [N, chunk_tokens / block_tokens] int64; payloads:
    [N] addresses on the device; present: [N], False leaves a page out.
    """

    shards: npt.ArrayLike
    block_ids: Int64s
    skip_tokens: npt.ArrayLike
    payloads: Int64s
    present: npt.ArrayLike

    @classmethod
    def absent(cls, table: PlaneTable, count: int) -> Self:
        """Pages that kernels leave out: for having kernels compiled and tables large enough beforehand."""
        return cls(
            shards=[next(iter(table.shards))] * count,
            block_ids=np.zeros((count, table.spec.chunk_tokens // table.layout.block_tokens), dtype=np.int64),
            skip_tokens=[0] * count,
            payloads=np.zeros(count, dtype=np.int64),
            present=[False] * count,
        )


class _Grown:
    """Pinned memory as numpy sees it, remade when more is needed. Slicing tensors would cost more than filling them."""

    def __init__(self, host_table: HostTable) -> None:
        self._host_table = host_table
        self._tensor = host_table(0)
        self.numbers: Int64s = self._tensor.numpy()
        self.address = 0

    def hold(self, count: int) -> None:
        """Have room for so many numbers."""
        if self.numbers.size < count:
            self._tensor = self._host_table(2 * count)
            self.numbers, self.address = self._tensor.numpy(), self._tensor.data_ptr()


class BurstTables:
    """pages [count, 8] and blocks [count, B]: their memory and addresses."""

    def __init__(self, host_table: HostTable) -> None:
        self._pages, self._blocks = _Grown(host_table), _Grown(host_table)
        self.count = 0

    @property
    def addresses(self) -> tuple[int, int]:
        """Of pages and blocks."""
        return self._pages.address, self._blocks.address

    def fill(self, table: PlaneTable, burst: BurstPages) -> None:
        """Describe a burst; the burst that filled it before has ended."""
        self.count, columns = burst.block_ids.shape
        self._blocks.hold(burst.block_ids.size)
        self._pages.hold(self.count * PAGE_COLUMNS)
        self._blocks.numbers[: self.count * columns] = burst.block_ids.reshape(-1)
        spec = table.spec
        rows = _page_rows(table)[np.asarray(burst.shards, dtype=np.int64)]
        rows[:, PageColumn.PAYLOAD_ADDRESS] = burst.payloads
        rows[:, PageColumn.SKIP_TOKENS] = np.asarray(burst.skip_tokens, dtype=np.int64) * spec.positions
        rows[:, PageColumn.SKIP_TOKENS] //= spec.chunk_tokens
        rows[:, PageColumn.HEADS] *= np.asarray(burst.present, dtype=np.int64)
        self._pages.numbers[: self.count * PAGE_COLUMNS] = rows.reshape(-1)


class TablePool:
    """Tables that are free. Thread-safe."""

    def __init__(self, host_table: HostTable) -> None:
        self._host_table = host_table
        self._lock = threading.Lock()
        self._free: list[BurstTables] = []

    def take(self) -> BurstTables:
        """Tables that are the caller's."""
        with self._lock:
            return self._free.pop() if self._free else BurstTables(self._host_table)

    def give(self, tables: BurstTables) -> None:
        """No kernel reads them any more."""
        with self._lock:
            self._free.append(tables)


@lru_cache(maxsize=64)
def _page_rows(table: PlaneTable) -> Int64s:
    """[shards, 8]: what all pages of a shard have in common, by shard number; not to be written."""
    rows = np.zeros((max(table.shards) + 1, PAGE_COLUMNS), dtype=np.int64)
    for number, shard in table.shards.items():
        rows[number, PageColumn.FIRST_PLANE] = shard.first_plane
        rows[number, PageColumn.PLANE_COUNT] = shard.plane_count
        rows[number, PageColumn.FIRST_SCALE_PLANE] = shard.first_scale_plane
        rows[number, PageColumn.SCALE_PLANE_COUNT] = shard.scale_plane_count
        rows[number, PageColumn.HEADS] = len(shard.heads)
    return rows


_TORCH_TYPES = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16, Dtype.FP32: torch.float32}


class CacheKernels:
    """Launches on the current stream. Tables must stay as they are until the launches have run."""

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
