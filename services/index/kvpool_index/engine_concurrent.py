"""Serving the requests of one stream concurrently, within a bound."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeVar, cast

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

_END: Final = object()


async def serve_concurrently(
    requests: AsyncIterator[RequestT],
    answer: Callable[[RequestT], Awaitable[ResponseT]],
    write: Callable[[ResponseT], Awaitable[None]],
    *,
    limit: int,
) -> None:
    """Answer until there are no more requests; answers are written one at a time, in the order in which they are ready.

    At most `limit` requests are read and not written, so that a slow receiver slows its own requests. An exception of
    any part ends the rest and is raised, in an ExceptionGroup.

    Workers take turns at reading, and whoever has read a request answers it: a task for each request, and the pass of
    the loop until it runs, would cost as much as judging a match.
    """
    reading, writing = asyncio.Lock(), asyncio.Lock()
    workers, waiting, ended = 1, 0, False

    async def read() -> RequestT | object:
        nonlocal ended
        async with reading:
            request = _END if ended else await anext(requests, _END)
            ended = request is _END
        return request

    async def work() -> None:
        nonlocal workers, waiting
        while True:
            waiting += 1
            request = await read()
            waiting -= 1
            if request is _END:
                return
            if not waiting and workers < limit:
                workers += 1
                group.create_task(work())
            response = await answer(cast("RequestT", request))
            async with writing:
                await write(response)

    async with asyncio.TaskGroup() as group:
        group.create_task(work())
