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

from kvpool.core import page as page_format
from kvpool.core.elements import Dtype
from kvpool.core.page import PageFault, PageKey
from kvpool.core.plane_table import PlaneTable
from kvpool.kernels.burst_tables import BurstTables, most_sum_blocks
from kvpool.kernels.dequantize import dequantize_scatter_pages
from kvpool.kernels.gather import gather_pages
from kvpool.kernels.page_sums import SumScratch, can_sum, sum_pages, verify_pages
from kvpool.kernels.quantize import gather_quantize_pages
from kvpool.kernels.row_codecs import CodecShape, RowCodec
from kvpool.kernels.scatter import scatter_pages
from kvpool.kernels.tables import CopyShape, copy_shape

SPACE_BLOCKS = 1024  # sum blocks of one burst: 256 MiB of whole blocks take 16 MiB of device memory

_TORCH_TYPES = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16, Dtype.FP32: torch.float32}


@dataclass(frozen=True, slots=True, eq=False)
class KernelSpace:
    """Device memory that kernels of one stream share: partial sums, and what verification tells the scatter."""

    sums: SumScratch
    faults: Tensor  # [SPACE_BLOCKS] int32

    @classmethod
    def allocate(cls, device: torch.device | str) -> Self:
        """raises: what torch raises when there is no memory."""
        faults = torch.zeros(SPACE_BLOCKS, dtype=torch.int32, device=device)
        return cls(SumScratch.allocate(SPACE_BLOCKS, device), faults)


class CacheKernels:
    """Launches on the current stream. Tables must stay as they are until the launches have run."""

    def __init__(self, table: PlaneTable, to_device: Callable[[npt.NDArray[np.int64]], Tensor]) -> None:
        self._table = table
        self._planes = to_device(table.planes)
        shards = list(table.shards.values())
        is_scale = np.zeros(len(table.planes), dtype=np.bool_)
        for shard in shards:
            is_scale[shard.first_scale_plane : shard.first_scale_plane + shard.scale_plane_count] = True
        most_planes = max(shard.plane_count for shard in shards)
        heads = len(shards[0].heads)
        self._codec: CodecShape | None = None
        self._scales: CopyShape | None = None
        if table.layout.holds_codec_rows(table.spec):
            self._data = self._copied(table.planes[~is_scale], heads, table.row_bytes, most_planes)
            if is_scale.any():
                self._scales = self._copied(table.planes[is_scale], heads, table.scale_row_bytes, most_planes)
        else:
            rows = CopyShape(
                table.spec.positions, table.block_rows, heads, table.cache_row_bytes, table.unit_bytes, most_planes
            )
            self._codec = CodecShape(rows, RowCodec(table.spec.codec.value), _TORCH_TYPES[table.spec.dtype])
        self.sum_columns = most_sum_blocks(table)
        # Otherwise some page ends in a block that is too short for the kernels: the CPU sums and verifies them all.
        self.sums_on_device = all(can_sum(shard.payload_bytes) for shard in shards)

    @property
    def most_pages(self) -> int:
        """Pages of a burst at most."""
        return SPACE_BLOCKS // self.sum_columns

    def gather(self, tables: BurstTables) -> None:
        """Fill the payloads of a burst from the cache."""
        if self._codec is not None:
            gather_quantize_pages(tables.pages, tables.blocks, self._planes, self._codec)
            return
        gather_pages(tables.pages, tables.blocks, self._planes, self._data)
        if self._scales is not None:
            gather_pages(tables.pages, tables.blocks, self._planes, self._scales, scales=True)

    def sum(self, tables: BurstTables, space: KernelSpace) -> None:
        """Write sum tables behind the payloads; `finish_page` does the rest."""
        if self.sums_on_device:
            sum_pages(tables.pages, self.sum_columns, space.sums)

    def verify(self, tables: BurstTables, space: KernelSpace) -> None:
        """Find the faults of pages that passed `check_page`: for `scatter`, and in tables.faults for the host."""
        faults = self._faults(tables, space)
        if faults is not None:
            verify_pages(tables.pages, faults, space.sums, host_faults=tables.faults)

    def scatter(self, tables: BurstTables, space: KernelSpace) -> None:
        """Move payloads without a fault into the cache."""
        faults = self._faults(tables, space)
        if self._codec is not None:
            dequantize_scatter_pages(tables.pages, tables.blocks, self._planes, self._codec, faults=faults)
            return
        scatter_pages(tables.pages, tables.blocks, self._planes, self._data, faults=faults)
        if self._scales is not None:
            scatter_pages(tables.pages, tables.blocks, self._planes, self._scales, faults=faults, scales=True)

    def finish_page(self, page: memoryview, key: PageKey, payload_bytes: int) -> None:
        """Complete a page on the CPU whose payload, and sums if the device can, have come from it."""
        if not self.sums_on_device:
            page_format.write_sums(page, payload_bytes)
        page_format.write_header(page, key, self._table.spec.codec, payload_bytes)

    def check_page(self, page: memoryview, key: PageKey, payload_bytes: int) -> PageFault | None:
        """What the CPU must verify before `verify` looks at the rest: header and sum table."""
        check = page_format.verify_header if self.sums_on_device else page_format.verify
        return check(page, key, self._table.spec.codec, payload_bytes)

    def _faults(self, tables: BurstTables, space: KernelSpace) -> Tensor | None:
        if not self.sums_on_device:
            return None
        count = tables.pages.shape[0]
        return space.faults[: count * self.sum_columns].view(count, self.sum_columns)

    def _copied(self, planes: npt.NDArray[np.int64], heads: int, row_bytes: int, most_planes: int) -> CopyShape:
        return copy_shape(
            planes.tolist(),
            positions=self._table.spec.positions,
            block_rows=self._table.block_rows,
            heads=heads,
            row_bytes=row_bytes,
            most_planes=most_planes,
        )
