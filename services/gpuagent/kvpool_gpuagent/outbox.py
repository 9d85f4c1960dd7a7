"""Answers of one stream on their way out: queued without waiting, written by one task."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)

LIMIT = 4096


class Outbox(Generic[T]):
    """Belongs to one event loop. Putting never waits, so that nothing that holds slots ever hangs on a slow reader."""

    def __init__(self, write: Callable[[T], Awaitable[None]], on_overflow: Callable[[], None]) -> None:
        """on_overflow: called once when the peer lets LIMIT answers pile up; what is put after that is dropped."""
        self._write, self._on_overflow = write, on_overflow
        self._waiting: deque[T] = deque()
        self._wake = asyncio.Event()
        self._closed = False
        self._writer = asyncio.ensure_future(self._write_all())

    def put(self, answer: T) -> None:
        """Queue an answer; after the end it is dropped."""
        if self._closed:
            return
        if len(self._waiting) >= LIMIT:
            self._closed = True
            self._on_overflow()
            return
        self._waiting.append(answer)
        self._wake.set()

    async def close(self, timeout_s: float) -> None:
        """Take no more, and give what is queued so long to be written."""
        self._closed = True
        self._wake.set()
        await asyncio.wait((self._writer,), timeout=timeout_s)
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)

    async def _write_all(self) -> None:
        try:
            while self._waiting or not self._closed:
                while self._waiting:
                    await self._write(self._waiting.popleft())
                self._wake.clear()
                if not self._closed:
                    await self._wake.wait()
        except Exception as error:
            # The call has ended under us; its reader sees that too, and ends the session.
            _log.debug("an answer could not be written: %s", error)
            self._closed = True
            self._waiting.clear()
