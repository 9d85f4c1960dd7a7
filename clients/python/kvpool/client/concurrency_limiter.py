"""How many calls of a kind run at once, how long others wait for their turn, and how all of them end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from kvpool.core.errors import DeadlineExceeded, ServiceUnavailable


class ConcurrencyLimiter:
    """Belongs to one event loop."""

    def __init__(self, at_once: int) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._calls: set[asyncio.Task[object]] = set()
        self._closed = False

    @contextlib.asynccontextmanager
    async def acquire(self, ends_at_s: float) -> AsyncGenerator[None]:
        """Run the block when it is its turn. ends_at_s: by the loop's clock.

        raises: DeadlineExceeded if the calls before it took all of its time; ServiceUnavailable after `close`.
        """
        call = asyncio.current_task()
        if self._closed or call is None:
            raise ServiceUnavailable("the pool was closed")
        self._calls.add(call)
        try:
            try:
                async with asyncio.timeout_at(ends_at_s):
                    await self._free.acquire()
            except TimeoutError:
                raise DeadlineExceeded("the calls before this one took all of its time") from None
            try:
                yield
            finally:
                self._free.release()
        finally:
            self._calls.discard(call)

    async def close(self) -> None:
        """Cancel the calls that run or wait. When this returns they have ended, and so have their copies."""
        self._closed = True
        calls = set(self._calls)
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls)
