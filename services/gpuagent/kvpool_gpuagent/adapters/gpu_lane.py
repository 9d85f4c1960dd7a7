"""One direction of a GPU: transfers in, bursts of pages out, two threads between.

One thread forms bursts and enqueues their work, the other waits for the GPU and settles them: while a burst is on the
link the next one's kernels run, and what arrives meanwhile goes into the one after.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpool.core.errors import KvPoolError
from kvpool.core.page import PageFault
from kvpool_gpuagent.adapters.gpu_runtime import GpuRuntime
from kvpool_gpuagent.adapters.gpu_scratch import Scratch
from kvpool_gpuagent.adapters.gpu_streams import LaneStreams
from kvpool_gpuagent.adapters.gpu_transfer import Issued, Mover, Transfer, settle
from kvpool_gpuagent.core.bursts import BurstSizer
from kvpool_gpuagent.core.ways import CONTENDED_TURN_S
from kvpool_gpuagent.ports import PageCopy

_log = logging.getLogger(__name__)

DEPTH = 4  # bursts enqueued and not settled: on the link, in kernels, waiting for a turn, being formed
_THREADS_END_S = 10.0


@dataclass(slots=True, eq=False)
class _Burst:
    mover: Mover
    size_bytes: int
    parts: list[tuple[Transfer, int, int]]  # transfer, first copy, number of copies
    scratch: tuple[int, int] | None
    issued: Issued | None = None

    @property
    def copies(self) -> list[PageCopy]:
        return [copy for transfer, first, count in self.parts for copy in transfer.copies[first : first + count]]


class Lane:
    """See above. Threads start with the first transfer."""

    def __init__(
        self,
        runtime: GpuRuntime,
        streams: LaneStreams,
        scratch: Scratch,
        name: str,
        sums_are_fast: Callable[[], bool],
        on_broken: Callable[[KvPoolError], None],
    ) -> None:
        """streams: those of its movers. sums_are_fast: whether the CPU sums at the link's speed.

        on_broken: called once if the GPU fails so that no later work can go on.
        """
        self.name, self.sums_are_fast = name, sums_are_fast
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

    @property
    def turn_s(self) -> float:
        """How long its kernels lately waited for their turn: long beside an engine that keeps the GPU busy."""
        return self._sizer.turn_s

    def sums_on_cpu(self) -> bool:
        """Whether the CPU shall sum and verify what an engine's kernels move: a kernel less beside its own work."""
        return self.sums_are_fast() and self.turn_s > CONTENDED_TURN_S

    def submit(self, transfer: Transfer) -> None:
        """Start a transfer; its `settled` says when nothing of it is running any more."""
        with self._changed:
            if self._closed:
                raise KvPoolError("the GPU device is closed")
            if self._broken is not None:
                raise self._broken
            if not self._threads:
                for target, role in ((self._issue_all, "issue"), (self._settle_all, "settle")):
                    name = f"{self.name}-{role}"
                    self._threads.append(threading.Thread(target=self._guarded, args=(target,), name=name, daemon=True))
                    self._threads[-1].start()
            self._pending.append(transfer)
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads once what was submitted has settled."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_THREADS_END_S)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Without its thread the lane would leave callers waiting for ever."""
        try:
            work()
        except Exception as error:
            _log.exception("a thread of lane %s has ended", self.name)
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
                burst.issued = burst.mover.issue(burst.copies, burst.scratch[0] if burst.scratch else 0)
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
        for transfer in [transfer for transfer in self._pending if transfer.stop()]:
            transfer.stopped = True
            self._pending.remove(transfer)
            if transfer.over:
                settle([transfer])

    def _form(self) -> _Burst | None:
        """The next burst out of what is pending; None if the scratch has no room for it now."""
        mover = self._pending[0].mover
        limit_bytes = self._sizer.next_bytes(continuing=self._in_flight_count > 0)
        first_bytes = mover.page_bytes(self._pending[0].copies[self._pending[0].issued])
        scratch = None
        if mover.needs_scratch:
            # Of what there is, not of what was asked for: otherwise a lane would wait for more than ever comes back.
            limit_bytes = min(limit_bytes, self._scratch.size_bytes // 4)
            wanted_bytes = self._wanted_bytes(mover, max(limit_bytes, first_bytes))
            # Not the crumbs between two bursts: each burst costs its launches.
            scratch = self._scratch.take(wanted_bytes, max(first_bytes, wanted_bytes // 2))
            if scratch is None:
                return None
            limit_bytes = scratch[1]
        burst = _Burst(mover, 0, [], scratch)
        pages = 0
        while self._pending and self._pending[0].mover is mover:
            transfer = self._pending[0]
            first = transfer.issued
            while transfer.issued < len(transfer.copies) and pages < mover.most_pages:
                size_bytes = mover.page_bytes(transfer.copies[transfer.issued])
                if pages and burst.size_bytes + size_bytes > limit_bytes:
                    break
                burst.size_bytes += size_bytes
                transfer.issued += 1
                pages += 1
            taken = transfer.issued - first
            if taken:
                transfer.in_flight += taken
                burst.parts.append((transfer, first, taken))
            if transfer.issued < len(transfer.copies):
                break
            self._pending.popleft()
        self._in_flight_count += 1
        return burst

    def _wanted_bytes(self, mover: Mover, limit_bytes: int) -> int:
        """Bytes of what is pending, up to a limit."""
        total_bytes = pages = 0
        for transfer in self._pending:
            if transfer.mover is not mover:
                break
            for copy in transfer.copies[transfer.issued :]:
                size_bytes = mover.page_bytes(copy)
                if total_bytes and (total_bytes + size_bytes > limit_bytes or pages == mover.most_pages):
                    return total_bytes
                total_bytes += size_bytes
                pages += 1
        return total_bytes

    # Settling

    def _settle_all(self) -> None:
        self._runtime.attach()
        while (burst := self._in_flight.get()) is not None:
            assert burst.issued is not None
            try:
                faults = burst.issued.finish()
            except Exception as error:
                self._fail(burst, error)
            else:
                turn_s = burst.issued.turn_s
                if turn_s is not None:
                    self._sizer.record(turn_s=turn_s)
                self._give_back(burst, faults, None)
            self._places.release()

    def _fail(self, burst: _Burst, error: Exception) -> None:
        """Part of the burst may be running: wait for it, so that nobody's memory is touched after this."""
        if isinstance(error, KvPoolError):
            failure = error
        else:
            _log.error("a burst of %d bytes failed on the GPU", burst.size_bytes, exc_info=error)
            failure = KvPoolError(f"the GPU failed ({error}); recompute these tokens")
        try:
            self._streams.synchronize()
        except Exception as broken:
            self._break(KvPoolError(f"the GPU does not answer any more ({broken}); restart the agent"))
        self._give_back(burst, None, failure)

    def _break(self, error: KvPoolError) -> None:
        with self._changed:
            if self._broken is not None:
                return
            self._broken = error
            pending, self._pending = list(self._pending), deque()
            for transfer in pending:
                transfer.error = error
            settle([transfer for transfer in pending if transfer.over])
        _log.error("%s", error)
        self._on_broken(error)

    def _give_back(self, burst: _Burst, faults: Sequence[PageFault | None] | None, error: KvPoolError | None) -> None:
        if burst.scratch is not None:
            self._scratch.give(*burst.scratch)
        with self._changed:
            self._in_flight_count -= 1
            at = 0
            for transfer, first, count in burst.parts:
                if faults is not None:
                    transfer.faults[first : first + count] = faults[at : at + count]
                at += count
                transfer.in_flight -= count
                if error is not None:
                    transfer.error = transfer.error or error
                    if transfer in self._pending:
                        self._pending.remove(transfer)
            settle([transfer for transfer, _, _ in burst.parts if transfer.over])
            self._changed.notify_all()
