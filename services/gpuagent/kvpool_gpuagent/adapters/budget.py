"""Permits for what a page pool may have out at once: leases of a session, bytes of bounce buffers."""

from __future__ import annotations

import asyncio
from collections import deque


class Budget:
    """Counts units out; a caller that asks for more than are free waits, first come first served. Belongs to one event
    loop.

    It cannot deadlock as long as no caller that holds units waits for more of the same budget: callers ask for a whole
    window at a time.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        """Units out now."""
        return self._used

    def take_now(self, count: int) -> bool:
        """Take `count` units if they are free and no one waits for others."""
        if self._waiting or not self._fits(count):
            return False
        self._used += count
        return True

    async def take(self, count: int) -> None:
        """Wait until `count` units are this caller's. More than the capacity is given only when nothing else is out."""
        if self.take_now(count):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give(count)  # it came in the same instant
            else:
                self._waiting = deque(entry for entry in self._waiting if entry[1] is not granted)
                self._grant()
            raise

    def give(self, count: int) -> None:
        """Return units."""
        self._used -= count
        self._grant()

    def resize(self, capacity: int) -> None:
        """Change the capacity; what is out stays out."""
        self.capacity = capacity
        self._grant()

    def _fits(self, count: int) -> bool:
        return self._used == 0 or self._used + count <= self.capacity

    def _grant(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            count, granted = self._waiting.popleft()
            if not granted.done():
                self._used += count
                granted.set_result(None)
