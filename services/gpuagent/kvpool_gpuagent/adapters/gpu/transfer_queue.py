"""One direction of a GPU: transfers in, bursts of pages out, two threads between.

One thread forms bursts and enqueues their work, the other waits for the GPU and completes them: while a burst is on the
link the next one is enqueued, and what arrives meanwhile goes into the one after.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from kvpool.core.cancel import CancelToken
from kvpool.core.chunks import Int64s
from kvpool.core.errors import KvPoolError
from kvpool_gpuagent.adapters.gpu.copy_paths import CopyPath, Issued, QueueStreams
from kvpool_gpuagent.adapters.gpu.runtime import GpuRuntime
from kvpool_gpuagent.adapters.gpu.scratch import Scratch
from kvpool_gpuagent.core.pages import FIRST_WINDOW_ORDER, CopyBatch

T = TypeVar("T")


async def finished(work: asyncio.Future[T]) -> tuple[asyncio.Future[T], bool]:
    """Return the work once it is done, and whether the caller was cancelled meanwhile: it raises that only then."""
    cancelled = False
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            cancelled = True
        except Exception:
            break  # the work's own: its caller gets it
    return work, cancelled


_log = logging.getLogger(__name__)

DEPTH = 4  # bursts enqueued and not completed: on the link, in kernels, waiting for a turn, being formed
RUN_BURST_BYTES = 64 << 20  # of bursts without kernels: on the link for a millisecond, as long as enqueuing the next
_THREADS_END_S = 10.0

_WEIGHT = 0.25  # of a new measurement
# A burst's copy must outlast the kernels of the next one, their turn included, or the link runs dry; twice, as turns
# vary.
_COPIES_PER_TURN = 2.0
_LINK_BYTES_PER_S = 55e9  # of PCIe 5 x16: on a slower link bursts are larger than they need be, no harm
FIRST_BYTES = 8 << 20  # on the link as long as the next burst takes to be enqueued
IDLE_BYTES = 32 << 20  # on an idle GPU: larger ones leave too few for both directions at once
MOST_PASSED = 8  # first windows that go before a waiting window: a large load has a third of the link's bytes or more


class BurstSizer:
    """Of one direction. Small bursts on an idle GPU (what is exposed before the first copy and after the last one is
    short), large ones beside a busy engine: on an H200 beside matrix products, bursts of 16 MiB reach 15 GB/s, of 128
    MiB 53 of 55."""

    def __init__(self, largest_bytes: int) -> None:
        self._largest_bytes = largest_bytes
        self.turn_s = 0.0  # lately
        self._last_bytes = 0

    def next_bytes(self, *, continuing: bool) -> int:
        """Bytes of the next burst at most. continuing: an earlier one is still in flight; sizes double then."""
        wanted = max(int(_COPIES_PER_TURN * self.turn_s * _LINK_BYTES_PER_S), FIRST_BYTES)
        if continuing:
            wanted = max(wanted, min(2 * self._last_bytes, IDLE_BYTES))
        self._last_bytes = min(wanted, self._largest_bytes)
        return self._last_bytes

    def record(self, *, turn_s: float) -> None:
        """turn_s: how long a burst's kernels, their turn included, were waited for; 0 if not at all."""
        self.turn_s += _WEIGHT * (turn_s - self.turn_s)


@dataclass(slots=True, eq=False)
class Transfer:
    """One call: its pages, in order. `outcome` gets True, or False if `stop` was cancelled."""

    path: CopyPath
    batch: CopyBatch
    stop: CancelToken
    outcome: asyncio.Future[bool]
    ends_bytes: Int64s = field(init=False)  # [N]: bytes of a page and all before it
    issued: int = 0  # leading pages that went into bursts
    in_flight: int = 0
    passed: int = 0  # later transfers that went before it
    stopped: bool = False
    error: KvPoolError | None = None

    def __post_init__(self) -> None:
        self.ends_bytes = np.cumsum(self.path.sizes_bytes(self.batch))

    @property
    def issued_bytes(self) -> int:
        return int(self.ends_bytes[self.issued - 1]) if self.issued else 0

    @property
    def left_bytes(self) -> int:
        return int(self.ends_bytes[-1]) - self.issued_bytes

    @property
    def over(self) -> bool:
        """Nothing of it is enqueued or will be."""
        ended = self.stopped or self.error is not None or self.issued == self.batch.count
        return ended and not self.in_flight

    def take(self, limit_bytes: int, most_pages: int) -> tuple[int, int, int]:
        """The next pages for a burst with so much room: first, count, bytes; no page if the first is larger."""
        first, before = self.issued, self.issued_bytes
        end = int(np.searchsorted(self.ends_bytes, before + limit_bytes, side="right"))
        count = max(0, min(end - first, most_pages))
        self.issued += count
        return first, count, self.issued_bytes - before


@dataclass(slots=True, eq=False)
class _Burst:
    path: CopyPath
    parts: list[tuple[Transfer, int, int]]  # transfer, first page, number of pages
    scratch: tuple[int, int] | None
    size_bytes: int = 0
    page_count: int = 0
    issued: Issued | None = None

    def batch(self) -> CopyBatch:
        return CopyBatch.joined([transfer.batch.part(first, count) for transfer, first, count in self.parts])


class TransferQueue:
    """See above. Threads start with the first transfer."""

    def __init__(
        self,
        runtime: GpuRuntime,
        streams: QueueStreams,
        scratch: Scratch,
        name: str,
        on_broken: Callable[[KvPoolError], None],
    ) -> None:
        """streams: those of its paths. on_broken: called once if the GPU fails so that no later work can go on."""
        self.name = name
        self._streams = streams
        self._runtime, self._scratch, self._on_broken = runtime, scratch, on_broken
        self._changed = scratch.changed
        self._pending: deque[Transfer] = deque()
        self._places = threading.Semaphore(DEPTH)
        self._in_flight: queue.SimpleQueue[_Burst | None] = queue.SimpleQueue()
        self._in_flight_count = 0
        self._sizer = BurstSizer(largest_bytes=scratch.wanted_bytes // 4)
        self._broken: KvPoolError | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []

    async def move(self, path: CopyPath, batch: CopyBatch, stop: CancelToken) -> bool:
        """Move pages; False if `stop` was cancelled. A cancelled caller gets CancelledError once nothing is running any
        more. Raises KvPoolError."""
        transfer = Transfer(path, batch, stop, asyncio.get_running_loop().create_future())
        self.submit(transfer)
        done, cancelled = await finished(transfer.outcome)
        if cancelled:
            done.exception()  # retrieved: the caller has left
            raise asyncio.CancelledError
        return done.result()

    def submit(self, transfer: Transfer) -> None:
        """Start a transfer of at least one page; its `outcome` says when nothing of it is running any more."""
        with self._changed:
            if self._closed:
                raise KvPoolError("the GPU device is closed")
            if self._broken is not None:
                raise self._broken
            if not self._threads:
                for target, role in ((self._issue_all, "issue"), (self._complete_all, "complete")):
                    name = f"{self.name}-{role}"
                    self._threads.append(threading.Thread(target=self._guarded, args=(target,), name=name, daemon=True))
                    self._threads[-1].start()
            self._pending.insert(self._place_of(transfer), transfer)
            self._changed.notify_all()

    def _place_of(self, transfer: Transfer) -> int:
        """Return the index of a new transfer: by its order, behind equal ones and what was passed often enough."""
        place = len(self._pending)
        while place and self._pending[place - 1].batch.order > transfer.batch.order:
            place -= 1
        if place == len(self._pending) or transfer.batch.order != FIRST_WINDOW_ORDER:
            return place
        while place < len(self._pending) and self._pending[place].passed >= MOST_PASSED:
            place += 1
        if place < len(self._pending):
            self._pending[place].passed += 1
        return place

    def close(self) -> None:
        """End the threads once what was submitted has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_THREADS_END_S)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Without its thread the queue would leave callers waiting forever."""
        try:
            work()
        except Exception as error:
            _log.exception("a thread of queue %s has ended", self.name)
            self._break(KvPoolError(f"the GPU cannot be used any more ({error}); restart the agent"))
            self._in_flight.put(None)

    # Issuing

    def _issue_all(self) -> None:
        self._runtime.attach()
        while True:
            self._places.acquire()
            burst = self._next_burst()
            if burst is None:
                self._in_flight.put(None)
                return
            try:
                burst.issued = burst.path.issue(burst.batch(), burst.scratch[0] if burst.scratch else 0)
            except Exception as error:
                self._fail(burst, error)
                self._places.release()
            else:
                self._in_flight.put(burst)

    def _next_burst(self) -> _Burst | None:
        with self._changed:
            while True:
                self._drop_stopped()
                if self._pending:
                    burst = self._form()
                    if burst is not None:
                        return burst
                elif self._closed:
                    return None
                self._changed.wait()

    def _drop_stopped(self) -> None:
        for transfer in [transfer for transfer in self._pending if transfer.stop.cancelled]:
            transfer.stopped = True
            self._pending.remove(transfer)
            if transfer.over:
                _complete([transfer])

    def _form(self) -> _Burst | None:
        """The next burst out of what is pending; None if the scratch has no room for it now."""
        path = self._pending[0].path
        first = self._pending[0]
        first_bytes = int(first.ends_bytes[first.issued]) - first.issued_bytes
        limit_bytes, scratch = max(RUN_BURST_BYTES, first_bytes), None
        if path.needs_scratch:
            limit_bytes = self._sizer.next_bytes(continuing=self._in_flight_count > 0)
            # Of what there is, not of what was asked for: otherwise a queue would wait for more than ever comes back.
            limit_bytes = max(min(limit_bytes, self._scratch.size_bytes // 4), first_bytes)
            wanted_bytes = self._wanted_bytes(path, limit_bytes)
            # Not the crumbs between two bursts: each burst costs its launches.
            scratch = self._scratch.take(wanted_bytes, max(first_bytes, wanted_bytes // 2))
            if scratch is None:
                return None
            limit_bytes = scratch[1]
        burst = _Burst(path, [], scratch)
        while self._pending and self._pending[0].path is path:
            transfer = self._pending[0]
            start, count, size_bytes = transfer.take(limit_bytes - burst.size_bytes, path.most_pages - burst.page_count)
            if count:
                burst.size_bytes += size_bytes
                burst.page_count += count
                transfer.in_flight += count
                burst.parts.append((transfer, start, count))
            if transfer.issued < transfer.batch.count:
                break
            self._pending.popleft()
        self._in_flight_count += 1
        return burst

    def _wanted_bytes(self, path: CopyPath, limit_bytes: int) -> int:
        """Bytes of what is pending for the path, up to a limit."""
        total_bytes = 0
        for transfer in self._pending:
            if transfer.path is not path or total_bytes >= limit_bytes:
                break
            total_bytes += transfer.left_bytes
        return min(total_bytes, limit_bytes)

    # Completing

    def _complete_all(self) -> None:
        self._runtime.attach()
        while (burst := self._in_flight.get()) is not None:
            assert burst.issued is not None
            try:
                burst.issued.finish()
            except Exception as error:
                self._fail(burst, error)
            else:
                turn_s = burst.issued.turn_s
                if turn_s is not None:
                    self._sizer.record(turn_s=turn_s)
                self._give_back(burst, None)
            self._places.release()

    def _fail(self, burst: _Burst, error: Exception) -> None:
        """Part of the burst may be running: wait for it, so that no memory is touched after this."""
        if isinstance(error, KvPoolError):
            failure = error
        else:
            _log.error("a burst of %d bytes failed on the GPU", burst.size_bytes, exc_info=error)
            failure = KvPoolError(f"the GPU failed ({error}); recompute these tokens")
        try:
            self._streams.synchronize()
        except Exception as broken:
            self._break(KvPoolError(f"the GPU does not answer any more ({broken}); restart the agent"))
        self._give_back(burst, failure)

    def _break(self, error: KvPoolError) -> None:
        with self._changed:
            if self._broken is not None:
                return
            self._broken = error
            pending, self._pending = list(self._pending), deque()
            for transfer in pending:
                transfer.error = error
            _complete([transfer for transfer in pending if transfer.over])
        _log.error("%s", error)
        self._on_broken(error)

    def _give_back(self, burst: _Burst, error: KvPoolError | None) -> None:
        if burst.scratch is not None:
            self._scratch.give(*burst.scratch)
        with self._changed:
            self._in_flight_count -= 1
            for transfer, _, count in burst.parts:
                transfer.in_flight -= count
                if error is not None:
                    transfer.error = transfer.error or error
                    if transfer in self._pending:
                        self._pending.remove(transfer)
            _complete([transfer for transfer, _, _ in burst.parts if transfer.over])
            self._changed.notify_all()


def _complete(transfers: Iterable[Transfer]) -> None:
    """Resolve the futures of transfers that are over, from any thread; in one wake-up of each event loop."""
    loops: dict[asyncio.AbstractEventLoop, list[Transfer]] = {}
    for transfer in transfers:
        loops.setdefault(transfer.outcome.get_loop(), []).append(transfer)
    for loop, own in loops.items():
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all that waited
            loop.call_soon_threadsafe(_resolve, own)


def _resolve(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        if transfer.error is not None:
            transfer.outcome.set_exception(transfer.error)
        else:
            transfer.outcome.set_result(not transfer.stopped)
