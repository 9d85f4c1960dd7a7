"""Worker threads that touch page bytes: gathers, verification and scatters never run on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class CopyThreads:
    """A few threads. A job that was started is waited for: only then do its slots and blocks have an owner again."""

    def __init__(self, thread_count: int) -> None:
        self.thread_count = thread_count
        self._pool = ThreadPoolExecutor(thread_count, thread_name_prefix="copy")

    async def run(self, job: Callable[[], T]) -> T:
        """Run a job. A cancelled caller gets CancelledError only after the job has ended."""
        return (await self.run_all([job]))[0]

    async def run_all(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run jobs side by side; the first error is raised once all have ended."""
        loop = asyncio.get_running_loop()
        futures = [loop.run_in_executor(self._pool, job) for job in jobs]
        cancelled = False
        while pending := {future for future in futures if not future.done()}:
            try:
                # Not gather: cancelling it would cancel jobs that wait for a thread, and nobody would undo them.
                await asyncio.wait(pending)
            except asyncio.CancelledError:
                cancelled = True
        failures = [error for future in futures if (error := future.exception()) is not None]
        if cancelled:
            raise asyncio.CancelledError
        if failures:
            raise failures[0]
        return [future.result() for future in futures]

    def close(self) -> None:
        """Wait for running jobs and end the threads."""
        self._pool.shutdown(wait=True)
