"""Serving the requests of one stream concurrently, within a bound."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


async def serve_concurrently(
    requests: AsyncIterator[RequestT],
    answer: Callable[[RequestT], Awaitable[ResponseT]],
    write: Callable[[ResponseT], Awaitable[None]],
    *,
    limit: int,
) -> None:
    """Answer until there are no more requests; answers are written one at a time, in the order in which they are ready.

    At most `limit` requests are read ahead of what was written, so that a slow receiver slows its own requests. An
    exception of any part ends the rest and is raised, in an ExceptionGroup.
    """
    slots = asyncio.Semaphore(limit)
    writing = asyncio.Lock()

    async def serve(request: RequestT) -> None:
        try:
            response = await answer(request)
            async with writing:
                await write(response)
        finally:
            slots.release()

    async with asyncio.TaskGroup() as group:
        async for request in requests:
            await slots.acquire()
            group.create_task(serve(request))
