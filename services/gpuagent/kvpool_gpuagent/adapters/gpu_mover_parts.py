"""What all ways of one cache share: its tables and kernels, the runtime, and who sums on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpool.core import page as page_format
from kvpool.core.page import HEADER_BYTES, PageFault
from kvpool.core.plane_table import PlaneTable
from kvpool.kernels.burst_tables import TablePool
from kvpool.kernels.cache_kernels import CacheKernels
from kvpool_gpuagent.adapters.gpu_runtime import GpuRuntime, Int64s
from kvpool_gpuagent.adapters.page_sums import PageSums, SummedPage
from kvpool_gpuagent.ports import PageCopy


@dataclass(frozen=True, slots=True, eq=False)
class MoverParts:
    """What the movers of one cache share."""

    table: PlaneTable
    kernels: CacheKernels
    runtime: GpuRuntime
    tables: TablePool
    sums: PageSums

    def payload_bytes(self, copy: PageCopy) -> int:
        """Of a page, without header and sum table."""
        return self.table.shards[copy.key.shard].payload_bytes

    def body_bytes(self, copies: Sequence[PageCopy]) -> Int64s:
        """[N] bytes of payload and sum table, which lie side by side."""
        sizes = [page_format.page_bytes(self.payload_bytes(copy)) - HEADER_BYTES for copy in copies]
        return np.array(sizes, dtype=np.int64)

    def seal_all(self, copies: Sequence[PageCopy]) -> None:
        """Sum and finish pages whose payload is in place."""
        self.sums.seal_all([self._summed(copy) for copy in copies])

    def verify_all(self, copies: Sequence[PageCopy]) -> list[PageFault | None]:
        """All of each page."""
        return self.sums.verify_all([self._summed(copy) for copy in copies])

    def verify_header(self, copy: PageCopy) -> PageFault | None:
        """Header and sum table; what they say of the payload is left to the GPU."""
        return self._summed(copy).verify_header()

    def write_header(self, copy: PageCopy) -> None:
        """Finish a page whose sums the GPU has made."""
        self._summed(copy).write_header()

    def _summed(self, copy: PageCopy) -> SummedPage:
        return SummedPage(copy.page, copy.key, self.table.spec.codec, self.payload_bytes(copy))
