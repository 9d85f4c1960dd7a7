"""Ending open streams when the service drains: they would otherwise outlast any grace."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvpool.core.errors import Draining


class OpenStreams:
    """The tasks that serve streams now."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._draining = asyncio.Event()

    @asynccontextmanager
    async def track(self) -> AsyncIterator[None]:
        """Around the whole handler of a stream, in the call's own task. Raises Draining once `end_all` was called."""
        task = asyncio.current_task()
        if self._draining.is_set() or task is None:
            raise Draining("the index is shutting down")
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._draining.is_set():
                raise
            task.uncancel()
            raise Draining("the index is shutting down; what was not acknowledged is to be sent again") from None
        finally:
            self._tasks.discard(task)

    def end_all(self) -> None:
        """End all streams with Draining, and refuse new ones."""
        self._draining.set()
        for task in self._tasks:
            task.cancel()
