"""Waits that end early: when a request is told to stop, or when its time is up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
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


async def each_until_stopped(
    answers: AsyncGenerator[T, None], stop: asyncio.Event, ends_at_s: float
) -> AsyncGenerator[T, None]:
    """Pass answers on until they end; Stopped or DeadlineExceeded (ends_at_s: on the loop's clock) ends them early.

    `answers` is closed in any case before the consumer goes on; close this generator too (contextlib.aclosing).
    """
    loop = asyncio.get_running_loop()
    try:
        while True:
            found = await until_stopped(_next(answers), stop, max(0.0, ends_at_s - loop.time()))
            if not found:
                return
            yield found[0]
    finally:
        await answers.aclose()


async def _next(answers: AsyncGenerator[T, None]) -> tuple[T, ...]:
    """The next answer, or nothing at the end (StopAsyncIteration must not leave a task)."""
    try:
        return (await anext(answers),)
    except StopAsyncIteration:
        return ()
