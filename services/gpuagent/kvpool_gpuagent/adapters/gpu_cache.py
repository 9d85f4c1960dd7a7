"""One engine's cache on the GPU: which path its pages take in each direction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.core.cancel import CancelToken
from kvpool_gpuagent.adapters.gpu_copies import Mover
from kvpool_gpuagent.adapters.gpu_lane import Lane
from kvpool_gpuagent.adapters.peer_memory import PeerMemory
from kvpool_gpuagent.core.pages import CopyBatch


@dataclass(frozen=True, slots=True, eq=False)
class Direction:
    """One direction of a cache.

    runs:    the copy engine alone; None if a codec makes other bytes of the rows.
    kernels: kernels and scratch; None where the GPU has no room for them.
    by_runs: [shard_count] bool: shards whose runs are long enough for the copy engine alone.
    """

    lane: Lane
    runs: Mover | None
    kernels: Mover | None
    by_runs: npt.NDArray[np.bool_]

    def mover(self, batch: CopyBatch) -> Mover:
        """What moves these pages."""
        mover = self.runs if self.by_runs[batch.shards].all() else self.kernels
        mover = mover or self.runs or self.kernels
        assert mover is not None
        return mover

    async def move(self, batch: CopyBatch, stop: CancelToken) -> bool:
        """See Lane.move."""
        return await self.lane.move(self.mover(batch), batch, stop) if batch.count else True


class GpuCache:
    """See ports.EngineCache."""

    def __init__(
        self,
        store: Direction,
        load: Direction,
        event_passed: Callable[[int], bool],
        unmap: Callable[[], None],
        peer: PeerMemory | None = None,
    ) -> None:
        """event_passed: asks one of the engine's events. unmap: closes memory and events; both may block shortly.
        peer: the same cache for pulls."""
        self.store, self.load, self.peer = store, load, peer
        self._event_passed, self._unmap = event_passed, unmap
        self._closed = False

    async def event_passed(self, slot: int) -> bool:
        """See ports.EngineCache."""
        return self._event_passed(slot)

    async def gather(self, batch: CopyBatch, stop: CancelToken) -> bool:
        """See ports.EngineCache."""
        return await self.store.move(batch, stop)

    async def scatter(self, batch: CopyBatch) -> None:
        """See ports.EngineCache."""
        await self.load.move(batch, CancelToken())

    async def close(self) -> None:
        """See ports.EngineCache."""
        if not self._closed:
            self._closed = True
            try:
                if self.peer is not None:
                    await self.peer.close()
            finally:
                await asyncio.to_thread(self._unmap)
