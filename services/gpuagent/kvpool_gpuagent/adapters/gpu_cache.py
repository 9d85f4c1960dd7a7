"""One engine's cache on the GPU: which way its pages take, and who waits for what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvpool.core.page import PageFault
from kvpool_gpuagent.adapters.gpu_engine_way import EngineWay
from kvpool_gpuagent.adapters.gpu_lane import Lane
from kvpool_gpuagent.adapters.gpu_moving import Moved, move_on_lane, until_over
from kvpool_gpuagent.adapters.gpu_transfer import Mover
from kvpool_gpuagent.adapters.peer_memory import PeerMemory
from kvpool_gpuagent.core.ways import Way, WayChooser
from kvpool_gpuagent.ports import PageCopy, StopFlag


@dataclass(frozen=True, slots=True, eq=False)
class Direction:
    """One direction of a cache: its lane, its movers, and what chooses among them."""

    lane: Lane
    movers: Mapping[Way, Mover]
    chooser: WayChooser
    engine: EngineWay | None = None  # of an engine that offers launches


class GpuCache:
    """See ports.EngineCache."""

    batch_bytes = 32 << 20

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

    async def gather(self, copies: Sequence[PageCopy], stop: StopFlag) -> bool:
        """See ports.EngineCache."""
        return await _moved(self.store, copies, stop) is not False

    async def scatter(self, copies: Sequence[PageCopy]) -> Sequence[PageFault | None]:
        """See ports.EngineCache."""
        faults = await _moved(self.load, copies, lambda: False)
        assert not isinstance(faults, bool)
        return faults

    async def close(self) -> None:
        """See ports.EngineCache."""
        if not self._closed:
            self._closed = True
            try:
                if self.peer is not None:
                    await self.peer.close()
            finally:
                await asyncio.to_thread(self._unmap)


async def _moved(direction: Direction, copies: Sequence[PageCopy], stop: StopFlag) -> Moved:
    """Move pages on the way of the hour. A cancelled caller is told so once nothing is running any more."""
    if not copies:
        return []
    way = direction.chooser.choose(direction.lane.turn_s, sums_are_fast=direction.lane.sums_are_fast())
    if way is Way.ENGINE:
        assert direction.engine is not None
        return await until_over(asyncio.ensure_future(direction.engine.move(copies, stop)))
    return await move_on_lane(direction.lane, direction.movers[way], copies, stop)
