"""Ends bulk streams that do not move: each takes one of few threads, and a deadline is the client's own choice."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

_LOOK_MIN_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How slow a stream may be."""

    idle_timeout_s: float  # between two pages read or two pieces written
    cap_s: float  # of the whole stream
    reader_grace_s: float  # what a reader may take in all, whatever it has read
    reader_bytes_per_s: float  # and besides for each byte


@contextmanager
def watched(context: grpc.ServicerContext, pace: Pace) -> Iterator[StreamWatch]:
    """Cancel the call if it is slower than its pace."""
    watch = StreamWatch(context, pace)
    try:
        yield watch
    finally:
        watch.end()


class StreamWatch:
    """Looks at a stream when it should have moved, on a thread of its own."""

    def __init__(self, context: grpc.ServicerContext, pace: Pace) -> None:
        self._context = context
        self._pace = pace
        self._moved_s = time.monotonic()
        self._ends_at_s = self._moved_s + pace.cap_s
        self._reader_left_s = pace.reader_grace_s  # only the time that the reader takes counts, not that of our disk
        self._handed_out_s = math.inf
        self._lock = threading.Lock()  # a watch that has ended starts no timer
        self._timer: threading.Timer | None = None
        self._ended = False
        self._look()

    def moved(self) -> None:
        """The client took or sent something."""
        self._moved_s = time.monotonic()

    @contextmanager
    def reading(self, size_bytes: int) -> Iterator[None]:
        """The reader has so many bytes to take while the block runs."""
        self._reader_left_s += size_bytes / self._pace.reader_bytes_per_s
        self._handed_out_s = time.monotonic()
        try:
            yield
        finally:
            self._reader_left_s -= time.monotonic() - self._handed_out_s
            self._handed_out_s = math.inf

    def end(self) -> None:
        """The stream has ended."""
        with self._lock:
            self._ended = True
            if self._timer is not None:
                self._timer.cancel()

    def _look(self) -> None:
        with self._lock:
            if self._ended:
                return
            due_s = (
                self._ends_at_s,
                self._moved_s + self._pace.idle_timeout_s,
                self._handed_out_s + self._reader_left_s,
            )
            left_s = min(due_s) - time.monotonic()
            if left_s > 0:
                # A reader may be handed something a moment after this look.
                self._timer = threading.Timer(min(left_s, max(self._reader_left_s, _LOOK_MIN_S)), self._look)
                self._timer.daemon = True
                self._timer.start()
                return
        self._context.cancel()
