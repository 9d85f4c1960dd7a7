"""Tables of one burst of pages, in pinned memory: taken for a burst, given back when it has settled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvpool.core.page import PageFault, PageFaultKind, block_count
from kvpool.core.plane_table import PlaneTable
from kvpool.kernels.tables import PAGE_COLUMNS, PageColumn

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
    """pages [count, 8], blocks [count, B] and faults [count, fault_columns] int32: their memory and addresses."""

    def __init__(self, host_table: HostTable) -> None:
        self._pages, self._blocks, self._faults = (_Grown(host_table) for _ in range(3))
        self.count = self.fault_columns = 0

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of pages, blocks and faults."""
        return self._pages.address, self._blocks.address, self._faults.address

    def fill(self, table: PlaneTable, burst: BurstPages) -> None:
        """Describe a burst; whoever filled it before has settled."""
        self.count, columns = burst.block_ids.shape
        self.fault_columns = most_sum_blocks(table)
        self._blocks.hold(burst.block_ids.size)
        self._faults.hold(self.count * self.fault_columns)  # twice as many as int32 need
        self._pages.hold(self.count * PAGE_COLUMNS)
        self._blocks.numbers[: self.count * columns] = burst.block_ids.reshape(-1)
        self._faults.numbers[: self.count * self.fault_columns] = 0
        spec = table.spec
        rows = _page_rows(table)[np.asarray(burst.shards, dtype=np.int64)]
        rows[:, PageColumn.PAYLOAD_ADDRESS] = burst.payloads
        rows[:, PageColumn.SKIP_TOKENS] = np.asarray(burst.skip_tokens, dtype=np.int64) * spec.positions
        rows[:, PageColumn.SKIP_TOKENS] //= spec.chunk_tokens
        rows[:, PageColumn.HEADS] *= np.asarray(burst.present, dtype=np.int64)
        self._pages_of_burst()[...] = rows

    def expect_verdicts(self) -> None:
        """Every block is at fault until a kernel that verifies says that it is not."""
        self._faults.numbers[: self.count * self.fault_columns] = -1  # as int32 it is not zero either

    def found_faults(self) -> list[PageFault | None]:
        """Per page of the burst, what verification found; once its kernels have ended."""
        faults = self._faults.numbers.view(np.int32)[: self.count * self.fault_columns].reshape(self.count, -1)
        found: list[PageFault | None] = [None] * self.count
        if not faults.any():
            return found
        pages = self._pages_of_burst()
        for page in np.flatnonzero(faults.any(axis=1)).tolist():
            blocks = np.flatnonzero(faults[page, : block_count(int(pages[page, PageColumn.PAYLOAD_BYTES]))])
            if blocks.size and pages[page, PageColumn.HEADS]:
                found[page] = PageFault(PageFaultKind.BAD_SUM, int(blocks[0]))
        return found

    def _pages_of_burst(self) -> Int64s:
        return self._pages.numbers[: self.count * PAGE_COLUMNS].reshape(self.count, PAGE_COLUMNS)


class TablePool:
    """Tables that nobody uses now. Thread-safe."""

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
        rows[number, PageColumn.PAYLOAD_BYTES] = shard.payload_bytes
        rows[number, PageColumn.HEADS] = len(shard.heads)
    return rows


@lru_cache(maxsize=64)
def most_sum_blocks(table: PlaneTable) -> int:
    """Sum blocks of the largest page of a rank."""
    return max(block_count(shard.payload_bytes) for shard in table.shards.values())
