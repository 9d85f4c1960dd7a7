"""What is kept beside pages on disk, changed in the order that it was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from kvpool.core.page import PageKey
from kvpool_pagestore.engine_tasks import EngineTasks
from kvpool_pagestore.ports import PageMetadata, PageStore, Workers


class MetadataWrites:
    """One write at a time, the next with all that came meanwhile: of two changes of one page the later stays.

    Threads would carry them out in any order. Use on one event loop.
    """

    def __init__(self, store: PageStore, writers: Workers, tasks: EngineTasks) -> None:
        self._store = store
        self._writers = writers
        self._tasks = tasks
        self._waiting: dict[PageKey, PageMetadata] = {}
        self._next: asyncio.Future[None] | None = None  # writes what is waiting
        self._latest: asyncio.Future[None] | None = None  # that began

    def write(self, changes: Sequence[tuple[PageKey, PageMetadata]]) -> Coroutine[Any, Any, None]:
        """Queue changes, at once. The answer returns when they are synced; it raises StoreFault and the like."""
        self._waiting.update(changes)
        if changes and self._next is None:
            work = self._tasks.finish(self._write_next(self._latest), "set-metadata")
            self._next = asyncio.ensure_future(work)
            self._next.add_done_callback(_heard)
        return _ended(self._next if changes else None)

    async def _write_next(self, before: asyncio.Future[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        changes, self._waiting = list(self._waiting.items()), {}
        self._latest, self._next = self._next, None
        await self._writers.run(self._store.set_metadata, changes)


async def _ended(write: asyncio.Future[None] | None) -> None:
    if write is not None:
        await asyncio.shield(write)


def _heard(write: asyncio.Future[None]) -> None:
    if not write.cancelled():
        write.exception()  # also when every caller has left; those who wait get it themselves
