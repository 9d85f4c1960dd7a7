"""Answering the requests of one stream concurrently, within a bound."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


@dataclass(frozen=True, slots=True)
class _End:
    """No more answers, because of an error or (None) because there are no more requests."""

    error: BaseException | None


async def answer_concurrently(
    requests: AsyncIterator[RequestT], answer: Callable[[RequestT], Awaitable[ResponseT]], *, limit: int
) -> AsyncGenerator[ResponseT, None]:
    """The answers in the order in which they are ready; at most `limit` requests are read ahead of what was taken.

    An exception of `answer` or of `requests` ends the stream and cancels what still runs. Close the generator to end.
    """
    ready: asyncio.Queue[ResponseT | _End] = asyncio.Queue()  # bounded, because every answer holds a slot
    slots = asyncio.Semaphore(limit)

    async def serve(request: RequestT) -> None:
        ready.put_nowait(await answer(request))

    async def run() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                async for request in requests:
                    await slots.acquire()
                    group.create_task(serve(request))
        except Exception as error:
            ready.put_nowait(_End(error))
        else:
            ready.put_nowait(_End(None))

    work = asyncio.create_task(run(), name="answer-stream")
    try:
        while not isinstance(item := await ready.get(), _End):
            slots.release()
            yield item
        if item.error is not None:
            raise item.error
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
