"""The queue in front of an agent."""

from __future__ import annotations

import asyncio

from kvpool.connectors.vllm.concurrency_limiter import ConcurrencyLimiter


class Requests:
    """That end when they are let."""

    def __init__(self, turns: ConcurrencyLimiter) -> None:
        self._limiter, self.running = turns, list[str]()
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, name: str, size_bytes: int) -> None:
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._run(name, size_bytes))
        await settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self._tasks[name]
        await settle()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)
        await settle()

    async def _run(self, name: str, size_bytes: int) -> None:
        async with self._limiter.acquire(size_bytes):
            self.running.append(name)
            try:
                await self._ends[name].wait()
            finally:
                self.running.remove(name)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_run_within_both_limits_in_the_order_they_came() -> None:
    requests = Requests(ConcurrencyLimiter(count=2, size_bytes=100))
    for name, size_bytes in (("a", 60), ("b", 60), ("c", 10), ("d", 10)):
        await requests.begin(name, size_bytes)
    assert requests.running == ["a"]  # c would fit, but b was first
    await requests.end("a")
    assert requests.running == ["b", "c"]
    await requests.end("b")
    assert requests.running == ["c", "d"]


async def test_a_request_that_is_too_large_runs_alone() -> None:
    requests = Requests(ConcurrencyLimiter(count=4, size_bytes=100))
    await requests.begin("small", 10)
    await requests.begin("large", 1000)
    await requests.begin("next", 10)
    assert requests.running == ["small"]
    await requests.end("small")
    assert requests.running == ["large"]
    await requests.end("large")
    assert requests.running == ["next"]


async def test_who_leaves_the_queue_holds_up_nobody() -> None:
    requests = Requests(ConcurrencyLimiter(count=4, size_bytes=100))
    await requests.begin("first", 60)
    await requests.begin("large", 90)
    await requests.begin("next", 10)
    await requests.cancel("large")
    assert requests.running == ["first", "next"]
    await requests.cancel("first")
    await requests.begin("again", 90)
    assert requests.running == ["next", "again"]
