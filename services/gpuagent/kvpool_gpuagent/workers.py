"""Worker threads that touch bytes: gathers, verification and scatters never run on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvpool_gpuagent.ports import EngineCache, PageCopy, StopFlag

T = TypeVar("T")


class Workers:
    """A few threads. A job that was started is waited for: only then do its slots and blocks have an owner again."""

    def __init__(self, thread_count: int) -> None:
        self.thread_count = thread_count
        self._pool = ThreadPoolExecutor(thread_count, thread_name_prefix="copy")

    async def run(self, job: Callable[[], T]) -> T:
        """Run a job. A cancelled caller still waits until the job has ended."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, job)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    async def gather(self, cache: EngineCache, copies: Sequence[PageCopy], stop: StopFlag) -> bool:
        """Gather all copies, spread over the threads; True if every one is complete. Then no thread touches them."""
        share = -(-len(copies) // self.thread_count)
        parts = [copies[start : start + share] for start in range(0, len(copies), share)]
        jobs = [self.run(lambda part=part: cache.gather(part, None, stop)) for part in parts]  # type: ignore[misc]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return sum(result for result in results if isinstance(result, int)) == len(copies)

    def close(self) -> None:
        """Wait for running jobs and end the threads."""
        self._pool.shutdown(wait=True)
