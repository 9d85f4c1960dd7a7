"""Tables of one burst of pages, in pinned memory: taken for a burst, given back when it has settled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
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

    shards, skip_tokens: [N]; block_ids: [N, chunk_tokens / block_tokens] int64; payloads: [N] addresses on the device;
    present: [N], False leaves a page out.
    """

    shards: Sequence[int]
    block_ids: Int64s
    skip_tokens: Sequence[int]
    payloads: Int64s
    present: Sequence[bool]


class BurstTables:
    """pages [N, 8], blocks [N, B] and faults [N, F]. The memory grows with the largest burst."""

    def __init__(self, host_table: HostTable) -> None:
        self._host_table = host_table
        self._pages = self._blocks = self._faults = host_table(0)
        self.pages = self.blocks = self.faults = self._pages

    def fill(self, table: PlaneTable, burst: BurstPages) -> None:
        """Describe a burst; whoever filled it before has settled."""
        count, columns = burst.block_ids.shape
        fault_columns = most_sum_blocks(table)
        self._pages, self.pages = self._shaped(self._pages, count, PAGE_COLUMNS)
        self._blocks, self.blocks = self._shaped(self._blocks, count, columns)
        self._faults, faults = self._shaped(self._faults, count, -(-fault_columns // 2))
        self.faults = faults.view(-1).view(torch.int32)[: count * fault_columns].view(count, fault_columns)
        self.faults.zero_()
        self.blocks.numpy()[...] = burst.block_ids
        shards = [table.of_shard(shard) for shard in burst.shards]
        pages = self.pages.numpy()
        pages[:, PageColumn.PAYLOAD_ADDRESS] = burst.payloads
        pages[:, PageColumn.FIRST_PLANE : PageColumn.SKIP_TOKENS] = [
            (
                shard.first_plane,
                shard.plane_count,
                shard.first_scale_plane,
                shard.scale_plane_count,
                shard.payload_bytes,
            )
            for shard in shards
        ]
        positions, tokens = table.spec.positions, table.spec.chunk_tokens
        pages[:, PageColumn.SKIP_TOKENS] = [skip * positions // tokens for skip in burst.skip_tokens]
        pages[:, PageColumn.PRESENT] = burst.present

    def found_faults(self) -> list[PageFault | None]:
        """Per page of the burst, what verification found; once its kernels have ended."""
        pages, faults = self.pages.numpy(), self.faults.numpy()
        found: list[PageFault | None] = [None] * len(pages)
        bad = np.flatnonzero(faults.any(axis=1))
        for page in bad.tolist():
            blocks = np.flatnonzero(faults[page, : block_count(int(pages[page, PageColumn.PAYLOAD_BYTES]))])
            if blocks.size and pages[page, PageColumn.PRESENT]:
                found[page] = PageFault(PageFaultKind.BAD_SUM, int(blocks[0]))
        return found

    def _shaped(self, tensor: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        if tensor.numel() < rows * columns:
            tensor = self._host_table(2 * rows * columns)
        return tensor, tensor[: rows * columns].view(rows, columns)


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


def most_sum_blocks(table: PlaneTable) -> int:
    """Sum blocks of the largest page of a rank."""
    return max(block_count(shard.payload_bytes) for shard in table.shards.values())
