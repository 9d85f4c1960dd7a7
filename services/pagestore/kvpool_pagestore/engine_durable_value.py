"""Small values of the node that outlive its process."""

from __future__ import annotations

import asyncio
import logging

from kvpool.core.errors import KvPoolError
from kvpool_pagestore.engine_disk import DiskTier
from kvpool_pagestore.engine_tasks import EngineTasks

_log = logging.getLogger(__name__)


class DurableValue:
    """One value beside the pages on disk. Without a disk tier it is forgotten at exit, as the pages are."""

    def __init__(self, disk: DiskTier | None, name: str, tasks: EngineTasks) -> None:
        self._disk = disk
        self._name = name
        self._tasks = tasks
        self._saving = asyncio.Lock()  # threads would save two values in any order

    async def load(self) -> bytes:
        """Return what was saved last; empty if nothing was. Raises StoreFault."""
        return (await self._disk.load_value(self._name) if self._disk is not None else None) or b""

    async def save(self, value: bytes) -> None:
        """Make a value durable; a failure of the disk is logged, and the process goes on with the new value.

        The last call wins, also if its caller is cancelled before it returns.
        """
        if self._disk is not None:
            await self._tasks.finish(self._save(self._disk, value), f"save-{self._name}")

    async def _save(self, disk: DiskTier, value: bytes) -> None:
        async with self._saving:
            try:
                await disk.save_value(self._name, value)
            except KvPoolError as error:
                _log.error("%s is lost at the next restart: %s", self._name, error)
