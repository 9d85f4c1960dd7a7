"""Waits that end early: when a request is told to stop, or when its time is up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvpool.core.errors import DeadlineExceeded, Stopped

T = TypeVar("T")


async def until_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event, timeout_s: float | None = None) -> T:
    """The work's result, unless `stop` is set or the time is up first: then the work is cancelled and waited for.

    Work that was already done, or ends with a result although it was cancelled, is never lost. Raises what the work
    raises, Stopped, DeadlineExceeded.
    """
    if stop.is_set():
        work.close()
        raise Stopped("the request was cancelled or its engine left")
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopping), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
    if not working.cancelled():
        return working.result()
    if stop.is_set():
        raise Stopped("the request was cancelled or its engine left")
    raise DeadlineExceeded(f"it was not done within {timeout_s or 0:g} s")
