"""Small facts of the node that outlive its process."""

from __future__ import annotations

import asyncio
import logging

from kvpool.core.errors import KvPoolError
from kvpool_pagestore.engine_disk import DiskTier
from kvpool_pagestore.engine_tasks import EngineTasks

_log = logging.getLogger(__name__)


class KeptValue:
    """One value beside the pages on disk. Without a disk tier nothing is kept, and no pages are either."""

    def __init__(self, disk: DiskTier | None, name: str, tasks: EngineTasks) -> None:
        self._disk = disk
        self._name = name
        self._tasks = tasks
        self._saving = asyncio.Lock()  # threads would save two values in any order

    async def load(self) -> bytes:
        """What was saved last; empty if nothing was. Raises StoreFault."""
        return (await self._disk.load_value(self._name) if self._disk is not None else None) or b""

    async def save(self, value: bytes) -> None:
        """Durable when this returns, unless the disk fails: that is logged, and what goes on now goes on.

        The last call has the last word, also where callers leave before theirs has returned.
        """
        if self._disk is not None:
            await self._tasks.finish(self._save(self._disk, value), f"save-{self._name}")

    async def _save(self, disk: DiskTier, value: bytes) -> None:
        async with self._saving:
            try:
                await disk.save_value(self._name, value)
            except KvPoolError as error:
                _log.error("%s is not kept over a restart: %s", self._name, error)
