"""Memory of the arena is in place before it is needed: segments are made and populated in the background at start.

What a store or a load would otherwise wait for is the kernel's work: finding, zeroing and mapping every page of memory.
Several threads do it at once, each on a segment of its own, because the kernel fills a file under a lock of that file;
each takes the memory of the NUMA node that it runs on. Measured on a host with 16 cores, in GB/s on 1, 4, 8 and 16
threads: 2.7, 8.8, 19 and 21 with pages of 4 KiB; 2.4, 6.8, 13 and 16 where huge pages are asked for (`shmem_enabled` of
the kernel at `advise`). So 512 GiB take 29 s, or 44 s, on 8 threads, where 60 s want 9.2 GB/s. The limit is the number
of cores that are free for it: at low priority, an engine that is starting beside it comes first.
"""

from __future__ import annotations

import asyncio
import logging

from kvpool.core.clock import Clock
from kvpool.core.errors import KvPoolError
from kvpool_pagestore.engine_quarantine import Quarantine
from kvpool_pagestore.engine_space import ArenaSpace
from kvpool_pagestore.engine_tasks import EngineTasks, background, cancelled
from kvpool_pagestore.ports import Workers

_log = logging.getLogger(__name__)

_TOLD_PARTS = 10  # progress is logged so many times
_TOLD_EVERY_S = 5.0  # or so often


class Preparation:
    """Fills the budget with segments that belong to no tenant. What fails is made when it is needed, as without it."""

    def __init__(
        self,
        segment_bytes: int,
        capacity_bytes: int,
        space: ArenaSpace,
        workers: Workers,
        quarantine: Quarantine,
        tasks: EngineTasks,
        clock: Clock,
    ) -> None:
        self._segment_bytes = segment_bytes
        self._capacity_bytes = capacity_bytes
        self._space = space
        self._workers = workers
        self._quarantine = quarantine
        self._tasks = tasks
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._is_filling = False
        self._is_stopped = False
        self._told_s = 0.0
        self._told_bytes = 0
        self.prepared_bytes = 0  # so far
        self.took_s = 0.0  # so far

    @property
    def goes_on(self) -> bool:
        """Whether there will be more prepared segments soon."""
        if self._is_stopped:
            return False
        return self._is_filling or (self._task is not None and self._quarantine.old_gone.is_set())

    def start(self) -> None:
        """Begin. Call once the node serves, on the engine's loop."""
        self._is_filling = True
        self._task = background(self._run(), "prepare-arena")

    async def stop(self) -> None:
        """Make no more segments; one that is being made is given up within some tens of milliseconds."""
        self._is_stopped = True
        await cancelled(self._task)

    # Inside

    async def _run(self) -> None:
        try:
            # Not cancelled in the middle: threads go on, and the engine waits for them before it lets go of the arena.
            await self._tasks.finish(self._fill(), "fill-arena")
            if not self._quarantine.old_gone.is_set():
                await self._quarantine.old_gone.wait()
                await self._tasks.finish(self._fill(), "fill-arena")
        finally:
            self._task = None

    async def _fill(self) -> None:
        """Make segments until the budget has no room for another one."""
        self._is_filling = True
        self._told_s = self._clock.monotonic_s()
        began_s, before_bytes = self._told_s - self.took_s, self.prepared_bytes
        try:
            await asyncio.gather(*(self._make_segments(began_s) for _ in range(self._workers.threads)))
        finally:
            self._is_filling = False
        if self.prepared_bytes > before_bytes:
            self._log_progress("prepared")

    async def _make_segments(self, began_s: float) -> None:
        """What one thread does. began_s: counts the time of earlier fills as well."""
        while not self._is_stopped and (made_bytes := await self._make()):
            self.prepared_bytes += made_bytes
            now_s = self._clock.monotonic_s()
            self.took_s = now_s - began_s
            grown_bytes = self.prepared_bytes - self._told_bytes
            if now_s - self._told_s >= _TOLD_EVERY_S or grown_bytes * _TOLD_PARTS >= self._capacity_bytes:
                self._told_s, self._told_bytes = now_s, self.prepared_bytes
                self._log_progress("being prepared")

    async def _make(self) -> int:
        """Bytes of a segment that was made; 0 if there is nothing left to make."""
        try:
            return await self._space.prepare(self._segment_bytes, self._workers, lambda: not self._is_stopped)
        except (KvPoolError, OSError) as error:
            if not self._is_stopped:  # the first one speaks for those that others are making
                _log.error("the arena is prepared in part, the rest is made when it is needed: %s", error)
            self._is_stopped = True
            return 0

    def _log_progress(self, what: str) -> None:
        _log.info(
            "the arena is %s: %.2f of %.2f GiB in %.1f s (%.1f GB/s)",
            what,
            self.prepared_bytes / (1 << 30),
            self._capacity_bytes / (1 << 30),
            self.took_s,
            self.prepared_bytes / 1e9 / self.took_s if self.took_s else 0.0,
        )
