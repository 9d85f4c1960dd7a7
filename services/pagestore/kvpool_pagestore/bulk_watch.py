"""Ends bulk streams that do not move: each takes one of few threads, and a deadline is the client's own choice."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc


@contextmanager
def watched(context: grpc.ServicerContext, *, idle_timeout_s: float, cap_s: float) -> Iterator[StreamWatch]:
    """Cancel the call if it has not `moved` for `idle_timeout_s`, or is still running after `cap_s`."""
    watch = StreamWatch(context, idle_timeout_s, cap_s)
    try:
        yield watch
    finally:
        watch.end()


class StreamWatch:
    """Looks at a stream when it should have moved, on a thread of its own."""

    def __init__(self, context: grpc.ServicerContext, idle_timeout_s: float, cap_s: float) -> None:
        self._context = context
        self._idle_timeout_s = idle_timeout_s
        self._moved_s = time.monotonic()
        self._ends_at_s = self._moved_s + cap_s
        self._lock = threading.Lock()  # a watch that has ended starts no timer
        self._timer: threading.Timer | None = None
        self._ended = False
        self._look()

    def moved(self) -> None:
        """The client took or sent something."""
        self._moved_s = time.monotonic()

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
            left_s = min(self._ends_at_s, self._moved_s + self._idle_timeout_s) - time.monotonic()
            if left_s > 0:
                self._timer = threading.Timer(left_s, self._look)
                self._timer.daemon = True
                self._timer.start()
                return
        self._context.cancel()
