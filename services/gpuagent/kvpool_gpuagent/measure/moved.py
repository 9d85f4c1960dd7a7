"""Doing one thing again and again for some seconds, with so many in flight, and what came of it.

As many transfers as are in flight at once always count, however late this process is scheduled.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool_gpuagent.adapters.gpu_runtime import GpuRuntime, Mark, Stream

_WARM_UPS = 2  # the first ever compiles kernels


@dataclass(slots=True)
class Moved:
    """size_bytes in duration_s, and the seconds of each transfer from its start to its end."""

    size_bytes: int = 0
    duration_s: float = 0.0
    transfers_s: list[float] = field(default_factory=list)


async def repeat(job: Callable[[int], Awaitable[int]], in_flight: int, seconds: float) -> Moved:
    """job: given the transfer's number, moves and returns its bytes. A new one starts as soon as one ends."""
    for number in range(_WARM_UPS):
        await job(number)
    await asyncio.gather(*(job(number) for number in range(in_flight)))
    moved, numbers = Moved(), itertools.count()
    started_s = time.perf_counter()

    async def keep_one_in_flight() -> None:
        for own_number in itertools.count():
            begun_s = time.perf_counter()
            if own_number and begun_s - started_s >= seconds:
                return
            size_bytes = await job(next(numbers))
            moved.size_bytes += size_bytes
            moved.transfers_s.append(time.perf_counter() - begun_s)

    await asyncio.gather(*(keep_one_in_flight() for _ in range(in_flight)))
    moved.duration_s = time.perf_counter() - started_s
    return moved


def repeat_on_stream(
    runtime: GpuRuntime, stream: Stream, enqueue: Callable[[int], int], in_flight: int, seconds: float
) -> Moved:
    """The same for plain work of one stream. enqueue: given a number, enqueues and returns its bytes. Blocks."""
    runtime.attach()
    for number in range(_WARM_UPS):
        enqueue(number)
    stream.synchronize()
    moved, pending = Moved(), deque[tuple[Mark, float]]()

    def wait_for_oldest() -> None:
        mark, begun_s = pending.popleft()
        mark.wait()
        moved.transfers_s.append(time.perf_counter() - begun_s)

    started_s = time.perf_counter()
    for number in itertools.count():
        begun_s = time.perf_counter()
        if number >= in_flight and begun_s - started_s >= seconds:
            break
        moved.size_bytes += enqueue(number)
        pending.append((stream.mark(), begun_s))
        if len(pending) == in_flight:
            wait_for_oldest()
    while pending:
        wait_for_oldest()
    moved.duration_s = time.perf_counter() - started_s
    return moved


def joined(results: Sequence[Moved]) -> dict[str, Any]:
    """The answer to a command: directions that ran side by side add up."""
    transfers_s = sorted(duration_s for moved in results for duration_s in moved.transfers_s)
    return {
        "bytes_per_s": sum(moved.size_bytes / moved.duration_s for moved in results),
        "p50_s": transfers_s[len(transfers_s) // 2],
        "transfers": len(transfers_s),
        "transfer_bytes": sum(moved.size_bytes for moved in results) // len(transfers_s),
    }
