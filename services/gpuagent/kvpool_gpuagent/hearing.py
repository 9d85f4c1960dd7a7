"""Waiting for what an engine says next, or for its silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

T = TypeVar("T")


async def hear(messages: AsyncIterator[T], *, silence_s: float, interval_s: float) -> T:
    """The next message. Raises TimeoutError if none comes for silence_s, StopAsyncIteration at the end of them.

    Where this process itself stood still for longer than interval_s, what came meanwhile is read first: nobody is taken
    for silent before that much time has passed again.
    """
    loop = asyncio.get_running_loop()
    reading = asyncio.ensure_future(_next(messages))
    limit_s = silence_s
    try:
        while True:
            asked_s = loop.time()
            await asyncio.wait((reading,), timeout=limit_s)
            if reading.done():
                return reading.result()
            if loop.time() - asked_s < limit_s + interval_s:
                raise TimeoutError
            limit_s = interval_s
    finally:
        reading.cancel()


async def _next(messages: AsyncIterator[T]) -> T:
    return await anext(messages)
