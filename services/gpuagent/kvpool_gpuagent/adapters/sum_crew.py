"""The sum workers that serve, the segments that all of them have mapped, and the thread that replaces the lost."""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpool_gpuagent.adapters.sum_process import SumProcess, wait_readable

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Segment:
    number: int
    address: int
    size_bytes: int
    descriptor: int  # ours, for workers that start later


class SumCrew:
    """Any thread may call. A worker serves once it has mapped every segment."""

    def __init__(self, process_count: int, restart_s: float) -> None:
        """Starts the workers in the background."""
        self.process_count, self._restart_s = process_count, restart_s
        self._lock = threading.Lock()  # of what is mapped where; held while workers map and unmap
        self._segments: tuple[_Segment, ...] = ()  # by address; replaced as a whole, so readers need no lock
        self._processes: tuple[SumProcess, ...] = ()
        self._numbers = itertools.count(1)
        self._stop_descriptor = os.eventfd(0)
        self._is_closing = False
        self._keeper = threading.Thread(target=self._keep, name="sum-workers", daemon=True)
        self._keeper.start()

    def processes(self) -> Sequence[SumProcess]:
        """Those that serve now."""
        return [process for process in self._processes if not process.is_lost]

    @property
    def has_segments(self) -> bool:
        """Whether any segment is registered: an agent without a local pagestore has none."""
        return bool(self._segments)

    def find(self, address: int, size_bytes: int) -> tuple[int, int] | None:
        """Segment number and offset of bytes of this process; None if they lie in no segment."""
        segments = self._segments
        at = bisect.bisect_right(segments, address, key=lambda segment: segment.address) - 1
        if at < 0 or address + size_bytes > segments[at].address + segments[at].size_bytes:
            return None
        return segments[at].number, address - segments[at].address

    def register(self, address: int, size_bytes: int, descriptor: int) -> Callable[[], None]:
        """Map a segment in all workers, within some seconds; returns what undoes that."""
        with self._lock:
            segment = _Segment(next(self._numbers), address, size_bytes, os.dup(descriptor))
            for process in self.processes():
                _map(process, segment)
            self._segments = tuple(sorted((*self._segments, segment), key=lambda one: one.address))
        return functools.partial(self._forget, segment)

    def close(self) -> None:
        """End all workers and wait until they have gone."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        os.eventfd_write(self._stop_descriptor, 1)
        self._keeper.join()
        os.close(self._stop_descriptor)
        for segment in self._segments:
            self._forget(segment)

    def _forget(self, segment: _Segment) -> None:
        with self._lock:
            if segment not in self._segments:
                return
            self._segments = tuple(one for one in self._segments if one != segment)
            for process in self.processes():
                try:
                    process.unmap(segment.number)
                except OSError:
                    process.lose()
                    if not process.wait_ended():
                        _log.error("sum worker %d cannot be ended, and has a segment mapped", process.pid)
            os.close(segment.descriptor)

    # The keeper. The kernel ends a worker with the thread that has started it, so one thread starts and ends all.

    def _keep(self) -> None:
        while not self._is_closing:
            self._start_missing()
            is_whole = len(self._processes) == self.process_count
            exits = [process.exit_descriptor for process in self._processes]
            wait_readable([self._stop_descriptor, *exits], None if is_whole else self._restart_s)
            if self._bury() and not self._is_closing:
                # Not at once: what has ended it may go on.
                wait_readable([self._stop_descriptor], self._restart_s)
        for process in self._processes:
            process.end()
        self._processes = ()

    def _start_missing(self) -> None:
        started: list[SumProcess] = []
        try:
            while len(self._processes) + len(started) < self.process_count:
                started.append(SumProcess())
        except OSError as error:
            _log.warning("a sum worker cannot be started: %s", error)
        for process in started:
            try:
                process.wait_ready(self._stop_descriptor)
                with self._lock:
                    for segment in self._segments:
                        _map(process, segment)
                    self._processes = (*self._processes, process)
            except OSError as error:
                if not self._is_closing:
                    _log.warning("a sum worker does not start: %s", error)
                process.end()

    def _bury(self) -> bool:
        ended = [process for process in self._processes if process.exit_code() is not None]
        for process in ended:
            _log.warning("sum worker %d has ended (%s); this process sums meanwhile", process.pid, process.exit_code())
        with self._lock:
            self._processes = tuple(process for process in self._processes if process not in ended)
        for process in ended:
            process.end()
        return bool(ended)


def _map(process: SumProcess, segment: _Segment) -> None:
    try:
        if not process.map(segment.number, segment.descriptor, segment.size_bytes):
            _log.warning("sum worker %d cannot map a segment; this process sums its part of it", process.pid)
    except OSError:
        process.lose()
