"""Queues requests to an agent, which refuses more than it accepts at once."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ConcurrencyLimiter:
    """Limits concurrent requests by count and total bytes, first come first served. Belongs to one event loop."""

    def __init__(self, *, count: int = sys.maxsize, size_bytes: int = sys.maxsize) -> None:
        """Unlimited by default. A request larger than size_bytes runs alone."""
        self._count, self._size_bytes = count, size_bytes
        self._running, self._running_bytes = 0, 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def acquire(self, size_bytes: int) -> AsyncIterator[None]:
        """Wait for a turn, and keep it until the block ends."""
        if self._waiting or not self._fits(size_bytes):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((size_bytes, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # it came in the same instant
                    self._end(size_bytes)
                else:
                    self._waiting.remove((size_bytes, turn))
                    self._admit()
                raise
        else:
            self._begin(size_bytes)
        try:
            yield
        finally:
            self._end(size_bytes)

    def _fits(self, size_bytes: int) -> bool:
        within = self._running < self._count and self._running_bytes + size_bytes <= self._size_bytes
        return within or not self._running

    def _begin(self, size_bytes: int) -> None:
        self._running, self._running_bytes = self._running + 1, self._running_bytes + size_bytes

    def _end(self, size_bytes: int) -> None:
        self._running, self._running_bytes = self._running - 1, self._running_bytes - size_bytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting and (self._waiting[0][1].cancelled() or self._fits(self._waiting[0][0])):
            size_bytes, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._begin(size_bytes)
                turn.set_result(None)
