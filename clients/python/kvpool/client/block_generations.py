"""Generations of an engine's blocks in shared memory: what was copied from a block counts if they are as announced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpool.client.shared_memory import SharedMemoryRegion
from kvpool.core.ipc import GENERATION_BYTES
from kvpool.core.layout import EngineLayout

Int64s = npt.NDArray[np.int64]


class BlockGenerations:
    """The table that EngineRegister.block_generations speaks of. Its engine alone writes it, on one thread.

    Raise the generations of blocks before GPU work that writes to them is launched; what was announced of these blocks
    is over then. A copy is trusted if the generation that was announced is found after it has ended.
    """

    def __init__(self, layout: EngineLayout) -> None:
        """raises: StartupFailed when there is not so much memory."""
        self.region = SharedMemoryRegion(layout.block_count * GENERATION_BYTES, "kvpool-generations")
        self._table = np.frombuffer(self.region.buffer, dtype=np.int64)

    @property
    def block_count(self) -> int:
        """Blocks of the cache."""
        return len(self._table)

    def of(self, block_ids: Int64s) -> Int64s:
        """Return the generations of blocks, in the shape of `block_ids`."""
        found: Int64s = self._table[block_ids]
        return found

    def raise_blocks(self, block_ids: Sequence[int] | Int64s) -> None:
        """These blocks will be written. Repetitions count once. raises: IndexError for what is not a block."""
        ids = np.asarray(block_ids, dtype=np.int64)
        if ids.size and ids.min() < 0:
            raise IndexError(f"block ids must be >= 0, got {ids.min()}")
        self._table[ids] += 1

    def raise_all(self) -> None:
        """Any block may be written."""
        self._table += 1

    def close(self) -> None:
        """The engine goes; sessions that map the table keep its memory."""
        del self._table
        self.region.close()
