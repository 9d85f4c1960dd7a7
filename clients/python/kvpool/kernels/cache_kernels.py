"""All kernels of one rank's cache, behind its plane table: what to launch for a burst of pages, and with which shapes.

The agent launches them in its own process, an engine that lends its GPU time in the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvpool.core.elements import Dtype
from kvpool.core.plane_table import PlaneTable
from kvpool.kernels.burst_tables import BurstPages, BurstTables, most_sum_blocks
from kvpool.kernels.codec_shapes import CodecShape, RowCodec
from kvpool.kernels.dequantize import dequantize_launch
from kvpool.kernels.gather import gather_launch
from kvpool.kernels.page_sums import SumScratch, can_sum, sums_launch
from kvpool.kernels.quantize import quantize_launch
from kvpool.kernels.scatter import scatter_launch
from kvpool.kernels.tables import CopyShape, copy_shape

SPACE_BLOCKS = 512  # sum blocks of one burst: 128 MiB of whole blocks take 8 MiB of device memory

_TORCH_TYPES = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16, Dtype.FP32: torch.float32}


@dataclass(frozen=True, slots=True, eq=False)
class KernelSpace:
    """Device memory that kernels of one stream share: partial sums, and what verification tells the scatter."""

    sums: SumScratch
    faults: Tensor  # [SPACE_BLOCKS] int32
    sum_addresses: tuple[int, int, int]
    faults_address: int

    @classmethod
    def allocate(cls, device: torch.device | str) -> Self:
        """raises: what torch raises when there is no memory."""
        faults = torch.zeros(SPACE_BLOCKS, dtype=torch.int32, device=device)
        sums = SumScratch.allocate(SPACE_BLOCKS, device)
        return cls(sums, faults, sums.addresses, faults.data_ptr())


class CacheKernels:
    """Launches on the current stream. Tables must stay as they are until the launches have run."""

    def __init__(self, table: PlaneTable, to_device: Callable[[npt.NDArray[np.int64]], Tensor]) -> None:
        self._table = table
        self._planes = to_device(table.planes)
        shards = list(table.shards.values())
        is_scale = np.zeros(len(table.planes), dtype=np.bool_)
        for shard in shards:
            is_scale[shard.scale_rows] = True
        self.sum_columns = most_sum_blocks(table)
        # Otherwise some page ends in a block that is too short for the kernels: the CPU sums and verifies them all.
        self.sums_on_device = all(can_sum(shard.payload_bytes) for shard in shards)
        self._sum = sums_launch(self.sum_columns, verify=False, host_faults=False)
        self._verify = sums_launch(self.sum_columns, verify=True, host_faults=True)
        if table.layout.holds_codec_rows(table.spec):
            copied = [(_copy_shape(table, ~is_scale, table.row_bytes), False)]
            if is_scale.any():
                copied.append((_copy_shape(table, is_scale, table.scale_row_bytes), True))
            self._gathers = [gather_launch(shape, scales) for shape, scales in copied]
            self._scatters = [scatter_launch(shape, self.sum_columns, scales) for shape, scales in copied]
            self._scatters_of_good = [scatter_launch(shape, 0, scales) for shape, scales in copied]
        else:
            codec = _codec_shape(table)
            self._gathers = [quantize_launch(codec)]
            self._scatters = [dequantize_launch(codec, self.sum_columns)]
            self._scatters_of_good = [dequantize_launch(codec, 0)]

    @property
    def most_pages(self) -> int:
        """Pages of a burst at most."""
        return SPACE_BLOCKS // self.sum_columns

    def gather(self, tables: BurstTables) -> None:
        """Fill the payloads of a burst from the cache."""
        pages, blocks, _ = tables.addresses
        for launch in self._gathers:
            launch.start(tables.count, pages, blocks, self._planes.data_ptr())

    def sum(self, tables: BurstTables, space: KernelSpace) -> None:
        """Write sum tables behind the payloads, where `sums_on_device`."""
        if self.sums_on_device:
            self._sum.start(tables.count, tables.addresses[0], 0, 0, *space.sum_addresses)

    def verify(self, tables: BurstTables, space: KernelSpace) -> None:
        """Find the faults of payloads, where `sums_on_device`: for `scatter`, and in the tables for the host.

        Headers and sum tables are the CPU's to verify before.
        """
        if self.sums_on_device:
            tables.expect_verdicts()
            pages, _, faults = tables.addresses
            self._verify.start(tables.count, pages, space.faults_address, faults, *space.sum_addresses)

    def scatter(self, tables: BurstTables, space: KernelSpace | None) -> None:
        """Move payloads into the cache. space: leave out those in which `verify` found a fault; None: all are good."""
        pages, blocks, _ = tables.addresses
        is_verified = space is not None and self.sums_on_device
        launches = self._scatters if is_verified else self._scatters_of_good
        faults = space.faults_address if space is not None and is_verified else 0
        for launch in launches:
            launch.start(tables.count, pages, blocks, self._planes.data_ptr(), faults)

    def warm_up(self, tables: BurstTables, space: KernelSpace) -> None:
        """Have all kernels compiled and loaded: launches that leave their only page out. Compiling takes seconds."""
        tables.fill(self._table, BurstPages.absent(self._table, 1))
        self.gather(tables)
        self.sum(tables, space)
        self.verify(tables, space)
        self.scatter(tables, space)
        self.scatter(tables, None)


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
