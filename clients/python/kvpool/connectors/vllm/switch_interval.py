"""How long threads of kvpool wait for the interpreter while an engine's own thread computes in Python."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future
from typing import Any

# CPython lets the engine's thread run for 5 ms while another one waits to run Python: for each message of a load, and
# for each page that a thread verifies and copies, several times. A thread that is kept waiting costs the engine's
# nothing, and one that is let run soon takes no longer for its work.
_SWITCH_INTERVAL_S = 0.00005


class _SwitchInterval:
    """The interval of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders, self._usual_s = 0, 0.0

    def shorten(self) -> None:
        """Have all threads wait for each other no longer than 50 microseconds, until as many calls of `restore`."""
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual_s, _SWITCH_INTERVAL_S))

    def restore(self) -> None:
        """See `shorten`. Does nothing where it is not shortened."""
        with self._lock:
            if self._holders == 1:
                sys.setswitchinterval(self._usual_s)
            self._holders = max(0, self._holders - 1)

    def shorten_until(self, future: Future[Any]) -> None:
        """Shorten it until the future is done. For lookups and loads: requests wait for them. No request waits for a
        store, so stores do not interrupt the engine's thread, and requests that arrive together are scheduled together.
        """
        self.shorten()
        future.add_done_callback(lambda _: self.restore())


switch_interval = _SwitchInterval()
